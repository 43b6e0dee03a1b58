"""POST /v1/request/:uuid/withdrawal. What becomes of its e-mails is in tests/worker/commands."""

import asyncio

import httpx
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


async def withdraw(client: httpx.AsyncClient, uuid: str) -> httpx.Response:
    return await client.post(f"/v1/request/{uuid}/withdrawal")


async def test_request_is_withdrawn_once_however_often_its_firm_asks(
    *, client, service_settings, issuer, database, created
):
    await database.execute("UPDATE calculation_request SET updated_at = '2000-01-01Z'")
    token = issuer.token("a-system", firm=CONVEYANCER)
    async with api_client(service_settings, token, auth_client_claim="firm") as system:
        with capture_logs() as logs:
            answers = await asyncio.gather(*[withdraw(system, created["uuid"]) for _ in range(20)])
        while any(answer.status_code == 503 for answer in answers):  # Others may hold the row for long.
            answers = [await withdraw(system, created["uuid"])]
        before = await database.fetchrow(STORED)
        again = await withdraw(system, created["uuid"])
    read = await client.get(f"/v1/request/{created['uuid']}")

    shown = [each.json()["data"] for each in (*answers, again, read)]
    assert shown == [created | {"updated_at": shown[0]["updated_at"]}] * len(shown)
    assert shown[0]["updated_at"] > "2000-01-02"
    assert await database.fetchrow(STORED) == before
    assert before["withdrawn_at"] == before["updated_at"]
    events = await database.fetch("SELECT type FROM event ORDER BY sequence")
    assert [row["type"] for row in events] == [
        *("request.created", "request.withdrawn", "request.email_failed"),
    ]
    (line,) = [each for each in logs if each["event"] == "request_withdrawn"]
    assert (line["client_id"], line["uuid"]) == ("a-system", created["uuid"])


async def test_create_with_the_same_key_replays_the_withdrawn_request(client, database):
    key = {"Idempotency-Key": "the-key"}
    created = (await client.post("/v1/request", json=A_REQUEST, headers=key)).json()["data"]
    withdrawn = (await withdraw(client, created["uuid"])).json()["data"]

    repeat = await client.post("/v1/request", json=A_REQUEST, headers=key)

    assert repeat.json()["data"] == withdrawn
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 1


@pytest.mark.parametrize(
    ("obstacle", "status", "code"),
    [
        ("another firm", 404, "not_found"),
        ("erased", 410, "erased"),
        ("secret_key_id = 'lost'", 503, "secret_unavailable"),
        ("locked", 503, "unavailable"),
    ],
)
async def test_refused_withdrawal_changes_nothing(
    *, client, issuer, database, other_connection, created, obstacle, status, code
):
    if obstacle == "another firm":
        client.headers.update(bearer(issuer.token(FREE_CONVEYANCER)))
    elif obstacle == "erased":
        async with database.transaction():
            await erasing.erase(database, [await database.fetchval("SELECT id FROM calculation_request")])
    elif obstacle != "locked":
        await database.execute(f"UPDATE calculation_request SET {obstacle}")  # noqa: S608 - constants only
    before = await other_connection.fetch(STORED)
    async with database.transaction():
        if obstacle == "locked":
            await database.execute("SELECT FROM calculation_request FOR UPDATE")
        async with asyncio.timeout(5.0):  # half of the settings' time for Postgres
            response = await withdraw(client, created["uuid"])

    assert (response.status_code, response.json()["errors"][0]["code"]) == (status, code)
    assert ("Retry-After" in response.headers) == (status == 503)
    assert await other_connection.fetch(STORED) == before
