"""POST /v1/request/:uuid/email and …/withdrawal. What becomes of the e-mails is in tests/worker/commands."""

import asyncio

import pytest
from structlog.testing import capture_logs

from service.outbox import waking
from service.postgres.pool import Connection
from tests.harness.examples import A_REQUEST, CONVEYANCER, FREE_CONVEYANCER
from tests.harness.http import bearer
from tests.harness.in_process import api_client
from tests.service.conftest import erase_all

ADDRESS = "ada.king@customer.example.com"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
EMAILS = "SELECT number, state, requested_by, traceparent FROM email ORDER BY number"
# With xmin, which every UPDATE changes.
STORED = (
    "SELECT request.xmin::text, request.*, (SELECT count(*) FROM event) FROM calculation_request AS request"
)
OBSTACLES = {"another firm": (404, "not_found"), "erased": (410, "erased")}
OBSTACLES |= {"no key": (503, "secret_unavailable"), "locked": (503, "unavailable")}


@pytest.fixture
def path(created):
    return f"/v1/request/{created['uuid']}"


async def set_first_email(database: Connection, state: str) -> None:
    """Record the request's first e-mail, as its consumer and the postman do."""
    await database.execute(
        "INSERT INTO email (request_id, number, kind, state, reason) "
        "SELECT id, 1, 'invitation', $1, CASE WHEN $1 = 'failed' THEN 'refused' END FROM calculation_request",
        state,
    )


@pytest.mark.parametrize("state", [None, "pending", "sent", "failed"])
@pytest.mark.parametrize("names_address", [False, True])
async def test_same_link_is_sent_again(client, database, created, path, state, names_address):
    if state:
        await set_first_email(database, state)
    before = await database.fetch(EMAILS)
    body = {"customer_email": created["customer_email"]} if names_address else {}

    answers = [await client.post(f"{path}/email", json=body, headers={"traceparent": TRACE}) for _ in "ab"]

    assert [(each.status_code, each.json()["data"]) for each in answers] == [(200, created)] * 2
    added = [(2, "pending", CONVEYANCER, TRACE)] if state in ("sent", "failed") else []
    assert await database.fetch(EMAILS) == before + added
    assert await database.fetchval("SELECT count(*) FROM event") == 1


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize(
    ("body", "changed"),
    [
        ({"customer_email": ADDRESS}, "customer_email"),
        ({"customer_email": ADDRESS, "new_link": True}, "customer_email"),
        ({"customer_email": None, "new_link": True}, "link"),
    ],
)
async def test_replaced_link_opens_nothing(client, database, created, path, body, changed, is_recorded):
    if is_recorded:
        await set_first_email(database, "pending")

    answer = await client.post(f"{path}/email", json=body, headers={"traceparent": TRACE})

    sent = answer.json()["data"]
    own = {"secret", "request_url", "updated_at"} | ({changed} & {"customer_email"})
    assert {name for name in created if created[name] != sent[name]} | {"updated_at"} == own
    assert sent["customer_email"] == (body["customer_email"] or created["customer_email"])
    assert (await client.get(path, headers=bearer(created["secret"]))).status_code == 401
    assert (await client.get(path, headers=bearer(sent["secret"]))).json()["data"]["uuid"] == sent["uuid"]
    emails = [row[:3] for row in await database.fetch(EMAILS)]
    assert emails == [(1, "failed", None), (2, "pending", CONVEYANCER)]
    (corrected, cancelled) = (await client.get(f"{path}/events")).json()["data"]["events"][1:]
    assert (corrected["type"], corrected["data"]["changed"]) == ("request.corrected", changed)
    assert (cancelled["data"]["reason"], cancelled["data"]["email"]) == ("cancelled", 1)
    traces = await database.fetch("SELECT traceparent FROM outbox WHERE sequence > 1")
    assert traces == [(TRACE,), (TRACE,)]


async def test_calls_at_the_same_time_add_one_email(client, database, path):
    await set_first_email(database, "sent")

    calls = [client.post(f"{path}/email", json={"new_link": number % 2 > 0}) for number in range(50)]
    refused = [each for each in await asyncio.gather(*calls) if each.status_code != 200]

    codes = {each.json()["errors"][0]["code"] for each in refused}
    assert codes <= {"too_many_emails", "unavailable"}
    assert [row["number"] for row in await database.fetch(EMAILS)] == [1, 2]


async def test_firm_may_ask_for_an_email_a_minute_and_for_twenty_in_all(client, database, path):
    await set_first_email(database, "sent")
    first, soon = [await client.post(f"{path}/email", json={"new_link": True}) for _ in range(2)]
    answers = []
    for number in range(20):
        await database.execute("UPDATE email SET created_at = created_at - interval '1 min', state = 'sent'")
        body = {"customer_email": ADDRESS} if number == 19 else {}
        answers.append(await client.post(f"{path}/email", json=body))

    assert [each.status_code for each in (first, *answers[:-1])] == [200] * 20
    for each in (soon, answers[-1]):
        assert each.json()["errors"][0]["code"] == "too_many_emails"
        assert each.headers["Retry-After"] == "60"
    assert len(await database.fetch(EMAILS)) == 21


async def test_request_is_withdrawn_once(client, service_settings, issuer, database):
    key, woken = {"Idempotency-Key": "the-key"}, asyncio.Event()
    await database.add_listener(waking.CHANNEL, lambda *_: woken.set())
    created = (await client.post("/v1/request", json=A_REQUEST, headers=key)).json()["data"]
    await asyncio.wait_for(woken.wait(), 10)
    woken.clear()
    await database.execute("UPDATE calculation_request SET updated_at = '2000-01-01Z'")
    path, token = f"/v1/request/{created['uuid']}", issuer.token("a-system", firm=CONVEYANCER)
    async with api_client(service_settings, token, auth_client_claim="firm") as system:
        with capture_logs() as logs:
            answers = await asyncio.gather(*[system.post(f"{path}/withdrawal") for _ in range(20)])
    before, emails = await database.fetchrow(STORED), await database.fetch(EMAILS)
    answers = [each for each in answers if each.status_code != 503]  # On a slow machine, some wait too long.
    answers += [await client.post(f"{path}/withdrawal"), await client.get(path)]
    answers += [await client.post("/v1/request", json=A_REQUEST, headers=key)]
    refused = [await client.post(f"{path}/email", json=body) for body in ({}, {"customer_email": ADDRESS})]

    shown = [each.json()["data"] for each in answers]
    assert shown == [created | {"updated_at": shown[0]["updated_at"]}] * len(shown)
    assert len(shown) > 3
    assert [each.json()["errors"][0]["code"] for each in refused] == ["withdrawn"] * 2
    assert (await database.fetch(STORED), await database.fetch(EMAILS)) == ([before], emails)
    assert before["withdrawn_at"] == before["updated_at"]
    events = await database.fetch("SELECT type FROM event ORDER BY sequence")
    assert events == [("request.created",), ("request.withdrawn",), ("request.email_failed",)]
    (line,) = [each for each in logs if each["event"] == "request_withdrawn"]
    assert (line["client_id"], line["uuid"]) == ("a-system", created["uuid"])
    await asyncio.wait_for(woken.wait(), 10)


@pytest.mark.parametrize("change", ["withdrawal", "email"])
@pytest.mark.parametrize("obstacle", OBSTACLES)
async def test_refused_change_does_nothing(
    client, issuer, other_connection, database, path, change, obstacle
):
    if obstacle == "another firm":
        client.headers.update(bearer(issuer.token(FREE_CONVEYANCER)))
    if obstacle == "no key":
        await database.execute("UPDATE calculation_request SET secret_key_id = 'lost'")
    if obstacle == "erased":
        await erase_all(database)
    before = await other_connection.fetch(STORED)
    async with database.transaction(), asyncio.timeout(5.0):  # half of the time that Postgres has
        if obstacle == "locked":
            await database.execute("SELECT FROM calculation_request FOR UPDATE")
        response = await client.post(f"{path}/{change}", json={})

    assert (response.status_code, response.json()["errors"][0]["code"]) == OBSTACLES[obstacle]
    assert ("Retry-After" in response.headers) == (response.status_code == 503)
    assert await other_connection.fetch(STORED) == before


async def test_locked_request_leaves_the_connections_to_others(service_settings, issuer, database, path):
    bounds = {"database_pool_size": 1, "database_timeout_seconds": 1.0}
    async with api_client(service_settings, issuer.token(), **bounds) as client, database.transaction():
        await database.execute("SELECT FROM calculation_request FOR UPDATE")
        changes = [asyncio.create_task(client.post(f"{path}/withdrawal")) for _ in range(5)]
        others = [await client.get(path) for _ in range(5)]

        assert [each.status_code for each in await asyncio.gather(*changes)] == [503] * 5
    assert [each.status_code for each in others] == [200] * 5
