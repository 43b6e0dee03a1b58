"""POST /v1/request/:uuid/withdrawal. What becomes of its e-mails is in tests/worker/commands."""

import asyncio

import pytest
from structlog.testing import capture_logs

from service.calculation_requests import erasing
from tests.harness.examples import A_REQUEST, CONVEYANCER, FREE_CONVEYANCER
from tests.harness.http import bearer
from tests.harness.in_process import api_client

# With xmin, which every UPDATE changes.
STORED = (
    "SELECT request.xmin::text, request.*, (SELECT count(*) FROM event) FROM calculation_request AS request"
)


async def test_request_is_withdrawn_once_however_often_its_firm_asks(
    *, client, service_settings, issuer, database
):
    key = {"Idempotency-Key": "the-key"}
    created = (await client.post("/v1/request", json=A_REQUEST, headers=key)).json()["data"]
    await database.execute("UPDATE calculation_request SET updated_at = '2000-01-01Z'")
    path, token = f"/v1/request/{created['uuid']}", issuer.token("a-system", firm=CONVEYANCER)
    async with api_client(service_settings, token, auth_client_claim="firm") as system:
        with capture_logs() as logs:
            answers = await asyncio.gather(*[system.post(f"{path}/withdrawal") for _ in range(20)])
    before = await database.fetchrow(STORED)
    answers = [each for each in answers if each.status_code != 503]  # On a slow machine, some wait too long.
    answers += [await client.post(f"{path}/withdrawal"), await client.get(path)]
    answers += [await client.post("/v1/request", json=A_REQUEST, headers=key)]

    shown = [each.json()["data"] for each in answers]
    assert shown == [created | {"updated_at": shown[0]["updated_at"]}] * len(shown)
    assert len(shown) > 3
    assert await database.fetch(STORED) == [before]
    assert before["withdrawn_at"] == before["updated_at"]
    events = await database.fetch("SELECT type FROM event ORDER BY sequence")
    assert events == [("request.created",), ("request.withdrawn",), ("request.email_failed",)]
    (line,) = [each for each in logs if each["event"] == "request_withdrawn"]
    assert (line["client_id"], line["uuid"]) == ("a-system", created["uuid"])


@pytest.mark.parametrize("change", ["withdrawal", "email"])
@pytest.mark.parametrize(
    ("obstacle", "status", "code"),
    [
        ("another firm", 404, "not_found"),
        ("erased", 410, "erased"),
        ("no key", 503, "secret_unavailable"),
        ("locked", 503, "unavailable"),
    ],
)
async def test_refused_change_changes_nothing(
    *, client, issuer, database, other_connection, created, change, obstacle, status, code
):
    if obstacle == "another firm":
        client.headers.update(bearer(issuer.token(FREE_CONVEYANCER)))
    if obstacle == "no key":
        await database.execute("UPDATE calculation_request SET secret_key_id = 'lost'")
    if obstacle == "erased":
        async with database.transaction():
            await erasing.erase(database, [await database.fetchval("SELECT id FROM calculation_request")])
    before = await other_connection.fetch(STORED)
    async with database.transaction(), asyncio.timeout(5.0):  # half of the time that Postgres has
        if obstacle == "locked":
            await database.execute("SELECT FROM calculation_request FOR UPDATE")
        response = await client.post(f"/v1/request/{created['uuid']}/{change}", json={})

    assert (response.status_code, response.json()["errors"][0]["code"]) == (status, code)
    assert ("Retry-After" in response.headers) == (status == 503)
    assert await other_connection.fetch(STORED) == before
