"""GET /v1/request/:uuid/events. tests/worker/test_request_events.py compares them with what consumers get."""

from typing import Any

import httpx
import msgspec
import pytest

from service.identifiers import new_request_id, uuid_of
from service.postgres.pool import Connection
from service.settings import ServiceSettings
from tests.harness.examples import A_REQUEST, CONVEYANCER, FREE_CONVEYANCER
from tests.harness.in_process import api_client
from tests.harness.issuer import Issuer


async def create(client: httpx.AsyncClient) -> str:
    """Store a request. Returns its uuid."""
    uuid: str = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]["uuid"]
    return uuid


async def test_new_request_has_been_created_and_no_more(
    client: httpx.AsyncClient, database: Connection
) -> None:
    uuid = await create(client)

    response = await client.get(f"/v1/request/{uuid}/events")

    assert response.status_code == 200
    assert response.json()["errors"] is None
    (event,) = response.json()["data"]["events"]
    written = msgspec.json.decode(await database.fetchval("SELECT payload FROM outbox"))
    assert event == {name: value for name, value in written.items() if name != "traceparent"}
    assert (event["id"], event["data"]["tenant"]) == (f"{uuid}.request.created.1", CONVEYANCER)


async def test_events_need_no_key_of_the_secret(
    client: httpx.AsyncClient, service_settings: ServiceSettings, issuer: Issuer
) -> None:
    uuid = await create(client)
    without = msgspec.structs.replace(service_settings, request_secret_keys=f"new:{'C' * 43}")

    async with api_client(without, issuer.token()) as keyless:
        record = await keyless.get(f"/v1/request/{uuid}")
        events = await keyless.get(f"/v1/request/{uuid}/events")

    assert record.status_code == 503
    assert events.status_code == 200


async def test_events_of_another_conveyancer_are_answered_like_those_of_an_unknown_request(
    client: httpx.AsyncClient, issuer: Issuer
) -> None:
    uuid = await create(client)
    as_another = {"Authorization": f"Bearer {issuer.token(FREE_CONVEYANCER)}"}

    others = await client.get(f"/v1/request/{uuid}/events", headers=as_another)
    unknown = await client.get(f"/v1/request/{uuid_of(new_request_id())}/events", headers=as_another)

    assert others.status_code == unknown.status_code == 404
    assert others.json()["errors"][0]["code"] == "not_found"
    assert {**others.json(), "meta": None} == {**unknown.json(), "meta": None}


@pytest.mark.parametrize("uuid", ["nonsense", "req_" + "z" * 22, "req_" + "0" * 21 + "-"])
async def test_malformed_uuid_is_not_found(shared_client: httpx.AsyncClient, uuid: str) -> None:
    response = await shared_client.get(f"/v1/request/{uuid}/events")

    assert response.status_code == 404
    assert response.json()["errors"][0]["code"] == "not_found"


@pytest.mark.parametrize(
    ("token", "status", "code"),
    [
        ({"scope": "request:write"}, 403, "insufficient_scope"),
        ({"client_id": "stranger"}, 403, "unknown_conveyancer"),
        ({"exp": 1}, 401, "unauthenticated"),
    ],
)
async def test_events_need_a_token_of_a_registered_conveyancer_that_may_read(
    shared_client: httpx.AsyncClient, issuer: Issuer, *, token: dict[str, Any], status: int, code: str
) -> None:
    headers = {"Authorization": f"Bearer {issuer.token(**token)}"}

    response = await shared_client.get(f"/v1/request/{uuid_of(new_request_id())}/events", headers=headers)

    assert (response.status_code, response.json()["errors"][0]["code"]) == (status, code)
