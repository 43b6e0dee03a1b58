"""Requests whose key was removed from REQUEST_SECRET_KEYS: what can still be read of them."""

import pytest

from service.calculation_requests.request_secrets import SecretKeyRing
from tests.harness.examples import A_REQUEST
from tests.harness.http import bearer
from tests.harness.in_process import api_client
from tests.harness.metrics import rises

MISSING = "request_secret_keys_missing_total"
KEY = {"Idempotency-Key": "closing"}
LOST = SecretKeyRing.parse(f"lost:{'C' * 43}").current_id


@pytest.fixture
async def without_key(database, client):
    """Return the uuid of the older of two requests, whose key the ring no longer has."""
    uuid: str = (await client.post("/v1/request", json=A_REQUEST, headers=KEY)).json()["data"]["uuid"]
    await database.execute("UPDATE calculation_request SET secret_key_id = $1", LOST)
    assert (await client.post("/v1/request", json=A_REQUEST)).status_code == 200
    return uuid


async def test_request_without_its_key_is_answered_with_503_until_the_key_is_restored(
    client, service_settings, issuer, without_key
):
    with rises(MISSING, by=2):
        answers = [
            await client.get(f"/v1/request/{without_key}"),
            await client.post("/v1/request", json=A_REQUEST, headers=KEY),
        ]
    ring = f"{service_settings.request_secret_keys},lost:{'C' * 43}"
    async with api_client(service_settings, issuer.token(), request_secret_keys=ring) as restarted:
        restored = await restarted.get(f"/v1/request/{without_key}")

    for answer in answers:
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "60")
        assert [error["code"] for error in answer.json()["errors"]] == ["secret_unavailable"]
        assert "lost" not in answer.text
    assert restored.json()["data"]["secret"] in restored.json()["data"]["request_url"]


async def test_what_shows_no_secret_needs_no_key(service_settings, issuer, without_key):
    async with api_client(service_settings, issuer.token(), auth_internal_clients="reader") as client:
        reader = bearer(issuer.token("reader", scope="request:read-all"))
        events = await client.get(f"/v1/request/{without_key}/events")
        record = await client.get(f"/v1/request/{without_key}", headers=reader)

    assert (events.status_code, record.status_code) == (200, 200)


async def test_list_shows_the_request_without_its_secret_and_the_others_in_full(client, without_key):
    with rises(MISSING):
        response = await client.get("/v1/request")

    assert response.status_code == 200
    whole, rest = response.json()["data"]["requests"]
    assert whole["request_url"].endswith(f"?secret={whole['secret']}")
    assert (rest["uuid"], rest["secret"], rest["request_url"]) == (without_key, None, None)
    assert rest | whole == whole | {"created_at": whole["created_at"]}
