"""Who sees a request: its firm, internal readers, and nobody else, not even by what an answer costs.

Internal readers are the clients of AUTH_INTERNAL_CLIENTS with the scope request:read-all.
test_retrieve_request.py shows it for each kind of uuid.
"""

from itertools import product
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from service.api.listing import FILTERS
from service.app import create_app
from service.authentication.access_tokens import READ_ALL
from service.calculation_requests import conveyancers
from service.identifiers import new_request_id, uuid_of
from tests.harness.endpoints import ENDPOINTS, Endpoint
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER
from tests.harness.http import bearer, lasting_headers
from tests.harness.in_process import api_client

# What a call refers to: something of the other conveyancer, or nothing that exists.
OTHERS = {"uuid": "", "key": "the-others-key", "case": "the-others-case"}
NOTHING = {"uuid": uuid_of(new_request_id()), "key": "unused-key", "case": "unused-case"}
# The last one is Litestar's own: not found.
ASSETS = ("openapi.json", "asyncapi.json", "page.css", "page.js", "rapidoc-min.js", "{path}")
THE_SAME_FOR_EVERY_CALLER = {"/", "/schema", *(f"/schema/{asset}" for asset in ASSETS)}
DIFFERS = ("uuid", "created_at", "updated_at", "secret", "request_url")  # each time
READER = "calculations-team"
EVERY_SCOPE = "request:read-all request:read request:write"


@pytest.fixture
async def reader(service_settings, issuer):
    """A client of an internal reader. Another internal reader is a conveyancer as well."""
    token, readers = issuer.token(READER, scope="request:read-all"), f" {READER}, ,{FREE_CONVEYANCER}"
    async with api_client(service_settings, token, auth_internal_clients=readers) as connected:
        yield connected


def test_every_route_is_covered(service_settings):
    routes = {
        (method, route.path_format)
        for route in create_app(service_settings).routes
        for method in getattr(route, "methods", ())
        if method != "OPTIONS"
    }

    others = routes - {(each.method, each.path) for each in ENDPOINTS}
    assert others == {("GET", path) for path in THE_SAME_FOR_EVERY_CALLER}


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
async def test_others_data_seems_not_to_exist(service_settings, issuer, link, statements, client, endpoint):
    body, headers = A_REQUEST | dict.fromkeys(FILTERS, OTHERS["case"]), {"Idempotency-Key": OTHERS["key"]}
    stored = (await client.post("/v1/request", json=body, headers=headers)).json()["data"]
    others = OTHERS | {"uuid": stored["uuid"]}
    if endpoint.method != "POST":
        assert others["uuid"] in (await call(client, endpoint, others)).text, "its own conveyancer finds it"
    token, changes = issuer.token(FREE_CONVEYANCER), {"database_url": link.url, "database_pool_size": 1}
    answers = []
    async with api_client(service_settings, token, **changes) as stranger:
        await call(stranger, endpoint, NOTHING | {"key": "another"})  # connects and prepares the statement
        for named in (others, NOTHING):
            statements.clear()
            answer = await call(stranger, endpoint, named)
            costs = [each for each in statements.executed if "SELECT pg_notify" not in each]
            body = answer.json() | {"meta": None}
            if isinstance(body["data"], dict):
                body["data"] |= dict.fromkeys(DIFFERS)
            answers.append((answer.status_code, lasting_headers(answer), body, costs))
            assert others["uuid"] not in answer.text
            assert costs != []

    assert answers[0] == answers[1], "the first statement must look for the request with its conveyancer"


async def test_internal_reader_reads_any_request_without_its_secret(reader, client, created):
    path = f"/v1/request/{created['uuid']}"
    response, head = await reader.get(path), await reader.head(path)
    firms_events, events = [(await each.get(f"{path}/events")).json()["data"] for each in (client, reader)]
    uuids = [created["uuid"], uuid_of(new_request_id()), "zqmark"]
    read = [endpoint for endpoint in ENDPOINTS if READ_ALL in endpoint.scopes]
    with capture_logs() as logs:
        for uuid, endpoint in product(uuids, read):
            await reader.request(endpoint.method, endpoint.at(uuid))
        await client.get(path)

    assert head.status_code == 200
    assert response.json()["data"] == created | {"secret": None, "request_url": None}
    assert list(response.json()["data"]) == list(created)
    assert created["secret"] not in response.text
    assert events == firms_events
    assert [event["type"] for event in events["events"]] == ["request.created"]
    attempts = [log for log in logs if log["event"] == "request_read_internally"]
    assert {(log["log_level"], log["client_id"]) for log in attempts} == {("info", READER)}
    shown = [uuid if uuid != "zqmark" else None for uuid, _ in product(uuids, read)]
    assert [log.get("uuid") for log in attempts] == shown
    assert not any(word in str(logs) for word in (created["secret"], "zqmark"))


async def test_reader_opens_nothing_else_with_any_scopes(reader, issuer, database, created):
    others = [endpoint for endpoint in ENDPOINTS if READ_ALL not in endpoint.scopes]
    tokens = product((READER, FREE_CONVEYANCER), ("request:read-all", EVERY_SCOPE))
    for (client_id, scopes), endpoint in product(tokens, others):
        headers = bearer(issuer.token(client_id, scope=scopes))
        path = endpoint.at(created["uuid"])
        answer = await reader.request(endpoint.method, path, json=endpoint.body, headers=headers)

        if not endpoint.scopes:  # the questionnaire
            assert answer.status_code == 200
            continue
        (error,), (scope,) = answer.json()["errors"], endpoint.scopes
        assert (answer.status_code, error["code"]) == (403, "insufficient_scope"), endpoint
        assert READ_ALL in error["message"]
        assert f'scope="{scope}"' in answer.headers["WWW-Authenticate"]
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 1


async def test_list_of_clients_and_scope_are_both_needed(reader, issuer, database, created):
    await conveyancers.register(database, "other-firm", name="Other", charges_calculation_fee=None)
    refused: list[tuple[dict[str, Any], int]] = [
        ({"client_id": "stranger"}, 403),  # not in the list
        ({"client_id": None}, 401),
        ({"client_id": [READER]}, 401),
        ({"client_id": f"{READER}, "}, 403),
        ({"client_id": READER, "scope": "request:read"}, 403),
        ({"client_id": "stranger", "sub": READER, "azp": READER}, 403),
        # A firm with both scopes that is no internal reader has its own requests only.
        ({"client_id": "other-firm", "scope": EVERY_SCOPE}, 404),
    ]
    for claims, status in refused:
        headers = bearer(issuer.token(**{"scope": "request:read-all", **claims}))
        response = await reader.get(f"/v1/request/{created['uuid']}", headers=headers)
        assert response.status_code == status, claims
