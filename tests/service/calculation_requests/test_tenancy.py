"""No route shows a conveyancer anything of another one, not even that it exists, nor by what it costs.

In tests/service/api, test_retrieve_request.py shows it for each kind of uuid.
"""

from typing import Any

import httpx
import pytest

from service.api.listing import FILTERS
from service.app import create_app
from service.identifiers import new_request_id, uuid_of
from tests.harness.endpoints import ENDPOINTS, Endpoint
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER
from tests.harness.http import bearer, lasting_headers

# What a call refers to: something of the other conveyancer, or nothing that exists.
OTHERS = {"uuid": "", "key": "the-others-key", "case": "the-others-case"}
NOTHING = {"uuid": uuid_of(new_request_id()), "key": "unused-key", "case": "unused-case"}
THE_SAME_FOR_EVERY_CALLER = {
    ("GET", "/"),
    ("GET", "/schema/openapi.json"),
    ("GET", "/schema/asyncapi.json"),
    ("GET", "/schema"),
    *(("GET", f"/schema/{asset}") for asset in ("page.css", "page.js", "rapidoc-min.js")),
    ("GET", "/schema/{path}"),  # Litestar's own: not found
}


@pytest.fixture
async def others(client):
    """A request of the other conveyancer."""
    body, headers = A_REQUEST | dict.fromkeys(FILTERS, OTHERS["case"]), {"Idempotency-Key": OTHERS["key"]}
    response = await client.post("/v1/request", json=body, headers=headers)
    return OTHERS | {"uuid": response.json()["data"]["uuid"]}


def test_every_route_is_covered(service_settings):
    routes = {
        (method, route.path_format)
        for route in create_app(service_settings).routes
        for method in getattr(route, "methods", ())
        if method != "OPTIONS"
    }

    assert routes - {(each.method, each.path) for each in ENDPOINTS} == THE_SAME_FOR_EVERY_CALLER


async def call(client: httpx.AsyncClient, endpoint: Endpoint, named: dict[str, str]) -> httpx.Response:
    parameters = {each.get("name") for each in endpoint.operation["parameters"]}
    return await client.request(
        endpoint.method,
        endpoint.at(named["uuid"]),
        json=endpoint.body,
        params=dict.fromkeys(parameters & {*FILTERS}, named["case"]),
        headers={"Idempotency-Key": named["key"]} if "Idempotency-Key" in parameters else {},
    )


@pytest.mark.parametrize("endpoint", [each for each in ENDPOINTS if each.scopes], ids=str)
async def test_data_of_another_conveyancer_is_answered_like_data_that_does_not_exist(
    issuer, statements, client, watched_client, others, endpoint
):
    if endpoint.method != "POST":
        assert others["uuid"] in (await call(client, endpoint, others)).text, "its own conveyancer finds it"
    stranger = watched_client
    stranger.headers.update(bearer(issuer.token(FREE_CONVEYANCER)))
    await call(stranger, endpoint, NOTHING | {"key": "another"})  # connects and prepares the statement
    answers, costs = [], []
    for named in (others, NOTHING):
        statements.clear()
        answers.append(await call(stranger, endpoint, named))
        costs.append([each for each in statements.executed if "SELECT pg_notify" not in each])

    assert answers[0].status_code == answers[1].status_code
    assert lasting_headers(answers[0]) == lasting_headers(answers[1])
    assert comparable(answers[0].json()) == comparable(answers[1].json())
    assert others["uuid"] not in answers[0].text
    assert costs[0] == costs[1] != [], "the first statement must look for the request with its conveyancer"


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without the values that differ each time."""
    data = body["data"]
    if isinstance(data, dict):
        differs = {"uuid", "created_at", "updated_at", "secret", "request_url"}
        data = {name: value for name, value in data.items() if name not in differs}
    return body | {"data": data, "meta": None}
