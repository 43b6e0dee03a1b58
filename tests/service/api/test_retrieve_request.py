"""GET /v1/request/:uuid, and its events, which tests/worker/test_request_events.py compares with the queue's.

test_openapi.py provokes each refusal; test_tenancy.py shows that of another firm's request.
"""

import msgspec
import pytest

from tests.harness.examples import A_REQUEST, CONVEYANCER
from tests.harness.in_process import api_client


async def test_retrieved_request_is_the_one_that_was_created(client):
    created = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]

    response = await client.get(f"/v1/request/{created['uuid']}")

    assert response.status_code == 200
    assert response.json()["data"] == created
    assert list(response.json()["data"]) == list(created)
    assert response.json()["errors"] is None


@pytest.mark.parametrize(
    "path",
    [
        "nonsense",
        "req_",
        "req_" + "z" * 22,  # more than 128 bits
        "req_" + "0" * 23,
        "REQ_" + "0" * 22,
        "req_" + "0" * 21 + "-",
        "req_" + "0" * 21 + "%0A",
        "%00",
        "0190f5d4-7d1c-7c3a-8b1e-2f4a6c8e0a12",
    ],
)
@pytest.mark.parametrize("what", ["", "/events"], ids=["record", "events"])
async def test_malformed_uuid_is_not_found(shared_client, path, what):
    response = await shared_client.get(f"/v1/request/{path}{what}")

    assert response.status_code == 404
    assert response.json()["errors"][0]["code"] == "not_found"


async def test_secret_stays_the_same_under_a_new_current_key(client, service_settings, issuer):
    created = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
    rotated = msgspec.structs.replace(
        service_settings, request_secret_keys=f"new:{'C' * 43},{service_settings.request_secret_keys}"
    )
    async with api_client(rotated, issuer.token()) as rotated_client:
        retrieved = (await rotated_client.get(f"/v1/request/{created['uuid']}")).json()["data"]
        newer = (await rotated_client.post("/v1/request", json=A_REQUEST)).json()["data"]

    assert retrieved["request_url"] == created["request_url"]
    assert newer["secret"] != created["secret"]


async def test_new_request_has_been_created_and_no_more(client, database):
    uuid = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]["uuid"]

    response = await client.get(f"/v1/request/{uuid}/events")

    assert response.status_code == 200
    assert response.json()["errors"] is None
    (event,) = response.json()["data"]["events"]
    written = msgspec.json.decode(await database.fetchval("SELECT payload FROM outbox"))
    assert event == {name: value for name, value in written.items() if name != "traceparent"}
    assert (event["id"], event["data"]["tenant"]) == (f"{uuid}.request.created.1", CONVEYANCER)


async def test_events_need_no_key_of_the_secret(client, service_settings, issuer):
    uuid = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]["uuid"]
    without = msgspec.structs.replace(service_settings, request_secret_keys=f"new:{'C' * 43}")

    async with api_client(without, issuer.token()) as keyless:
        record = await keyless.get(f"/v1/request/{uuid}")
        events = await keyless.get(f"/v1/request/{uuid}/events")

    assert record.status_code == 503
    assert events.status_code == 200
