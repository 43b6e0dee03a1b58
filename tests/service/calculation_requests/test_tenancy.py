"""No route shows a conveyancer anything of another one, not even that it exists, nor by what it costs.

In tests/service/api, test_retrieve_request.py shows it for each kind of uuid.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

from service.app import create_api
from service.identifiers import new_request_id, uuid_of
from service.server import probes
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER
from tests.harness.in_process import api_client


class Named(msgspec.Struct, frozen=True):
    """What a call can refer to: by default to nothing that exists."""

    uuid: str = uuid_of(new_request_id())
    idempotency_key: str = "unused-key"
    external_id: str = "unused-case"


Call = Callable[[httpx.AsyncClient, Named], Awaitable[httpx.Response]]


async def create(stranger: httpx.AsyncClient, named: Named) -> httpx.Response:
    body = A_REQUEST | {"external_id": "case"}
    return await stranger.post("/v1/request", json=body, headers={"Idempotency-Key": named.idempotency_key})


async def retrieve(stranger: httpx.AsyncClient, named: Named) -> httpx.Response:
    return await stranger.get(f"/v1/request/{named.uuid}")


async def list_events(stranger: httpx.AsyncClient, named: Named) -> httpx.Response:
    return await stranger.get(f"/v1/request/{named.uuid}/events")


async def list_by_external_id(stranger: httpx.AsyncClient, named: Named) -> httpx.Response:
    return await stranger.get("/v1/request", params={"external_id": named.external_id})


CALLS: dict[tuple[str, str], Call] = {
    ("POST", "/v1/request"): create,
    ("GET", "/v1/request"): list_by_external_id,
    ("GET", "/v1/request/{uuid:str}"): retrieve,
    ("GET", "/v1/request/{uuid:str}/events"): list_events,
}
THE_SAME_FOR_EVERY_CALLER = {
    *(("GET", path) for path in probes.PATHS),
    ("GET", "/v1/questionnaire/structure"),
    ("GET", "/schema/openapi.json"),
    ("GET", "/schema/asyncapi.json"),
    ("GET", "/schema"),
    ("GET", "/schema/{asset:str}"),
}


@pytest.fixture
async def others(client):
    """A request of the other conveyancer."""
    headers = {"Idempotency-Key": "the-others-key"}
    body = A_REQUEST | {"external_id": "the-others-case"}
    response = await client.post("/v1/request", json=body, headers=headers)
    return Named(response.json()["data"]["uuid"], "the-others-key", "the-others-case")


def test_every_route_is_covered(service_settings):
    routes = {
        (method, route.path)
        for route in create_api(service_settings).routes
        for method in getattr(route, "methods", ())
        if method != "OPTIONS"
    }

    assert routes - CALLS.keys() - THE_SAME_FOR_EVERY_CALLER == set()


@pytest.mark.parametrize("call", CALLS.values(), ids=[" ".join(route) for route in CALLS])
async def test_data_of_another_conveyancer_is_answered_like_data_that_does_not_exist(
    service_settings, issuer, link, statements, client, others, call
):
    if call != create:
        assert others.uuid in (await call(client, others)).text, "its own conveyancer finds it"
    async with api_client(
        service_settings, issuer.token(FREE_CONVEYANCER), database_url=link.url, database_pool_size=1
    ) as stranger:
        await call(stranger, Named(idempotency_key="another"))  # connects and prepares the statement
        answers, costs = [], []
        for named in (others, Named()):
            statements.clear()
            answers.append(await call(stranger, named))
            costs.append([each for each in statements.executed if "SELECT pg_notify" not in each])

    assert answers[0].status_code == answers[1].status_code
    assert comparable_headers(answers[0]) == comparable_headers(answers[1])
    assert comparable(answers[0].json()) == comparable(answers[1].json())
    assert others.uuid not in answers[0].text
    assert costs[0] == costs[1] != []


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without the values that differ each time."""
    data = body["data"]
    if isinstance(data, dict):
        differs = {"uuid", "created_at", "updated_at", "secret", "request_url"}
        data = {name: value for name, value in data.items() if name not in differs}
    return body | {"data": data, "meta": None}


def comparable_headers(response: httpx.Response) -> list[tuple[str, str]]:
    """Return the headers, in order, without those that differ each time."""
    return [(name, value) for name, value in response.headers.items() if name not in {"date", "x-request-id"}]
