"""POST /v1/request/:uuid/email. What any change refuses is in test_withdraw_request.py."""

import asyncio

import pytest

from service.postgres.pool import Connection
from tests.harness.examples import CONVEYANCER
from tests.harness.http import bearer

ADDRESS = "ada.king@customer.example.com"
EMAILS = "SELECT number, state, requested_by, traceparent FROM email ORDER BY number"
LATEST = "SELECT type, data FROM event WHERE sequence > 1 ORDER BY sequence"


@pytest.fixture
def path(created):
    return f"/v1/request/{created['uuid']}/email"


async def set_first_email(database: Connection, state: str) -> None:
    """Record the request's first e-mail, as its consumer and the postman do."""
    reason = "refused" if state == "failed" else None
    await database.execute(
        "INSERT INTO email (request_id, number, kind, state, reason) "
        "SELECT id, 1, 'invitation', $1, $2 FROM calculation_request",
        state,
        reason,
    )


@pytest.mark.parametrize("state", ["sent", "failed"])
@pytest.mark.parametrize("names_its_address", [False, True])
async def test_same_link_is_sent_again(*, client, database, created, path, state, names_its_address):
    await set_first_email(database, state)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"customer_email": created["customer_email"]} if names_its_address else {}

    response = await client.post(path, json=body, headers={"traceparent": trace})

    assert (response.status_code, response.json()["data"]) == (200, created)
    assert (await database.fetch(EMAILS))[1:] == [(2, "pending", CONVEYANCER, trace)]
    assert await database.fetch(LATEST) == []


@pytest.mark.parametrize("is_recorded", [False, True])
async def test_pending_email_is_left_alone(client, database, created, path, is_recorded):
    if is_recorded:
        await set_first_email(database, "pending")
    before = await database.fetch(EMAILS)

    answers = [await client.post(path, json={}) for _ in range(2)]

    assert [answer.json()["data"] for answer in answers] == [created] * 2
    assert await database.fetch(EMAILS) == before


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize(
    ("body", "changed"),
    [
        ({"customer_email": ADDRESS}, "customer_email"),
        ({"customer_email": ADDRESS, "new_link": True}, "customer_email"),
        ({"new_link": True}, "link"),
        ({"customer_email": None, "new_link": True}, "link"),
    ],
)
async def test_old_link_opens_nothing_once_another_is_sent(
    *, client, database, created, path, body, changed, is_recorded
):
    if is_recorded:
        await set_first_email(database, "pending")
    record = path.removesuffix("/email")

    sent = (await client.post(path, json=body)).json()["data"]

    own = {"secret", "request_url", "updated_at"} | ({changed} & {"customer_email"})
    assert {name for name in created if created[name] != sent[name]} | {"updated_at"} == own
    assert sent["customer_email"] == (body.get("customer_email") or created["customer_email"])
    assert (await client.get(record, headers=bearer(created["secret"]))).status_code == 401
    assert (await client.get(record, headers=bearer(sent["secret"]))).json()["data"]["uuid"] == sent["uuid"]
    emails = [row[:3] for row in await database.fetch(EMAILS)]
    first = [(1, "failed", None)] if is_recorded else []
    assert emails == [*first, (len(first) + 1, "pending", CONVEYANCER)]
    (corrected, *ends) = (await client.get(f"{record}/events")).json()["data"]["events"][1:]
    assert (corrected["type"], corrected["data"]["changed"]) == ("request.corrected", changed)
    assert [(end["data"]["reason"], end["data"]["email"]) for end in ends] == [("cancelled", 1)] * len(first)


async def test_calls_at_the_same_time_add_one_email(client, database, path):
    await set_first_email(database, "sent")

    answers = await asyncio.gather(*[client.post(path, json={"new_link": i % 2 > 0}) for i in range(50)])

    codes = {each.json()["errors"][0]["code"] for each in answers if each.status_code != 200}
    assert codes <= {"too_many_emails", "unavailable"}
    assert [row["number"] for row in await database.fetch(EMAILS)] == [1, 2]


async def test_firm_may_ask_for_an_email_a_minute_and_for_twenty_in_all(client, database, path):
    await set_first_email(database, "sent")
    earlier = "UPDATE email SET created_at = created_at - interval '1 min', state = 'sent'"
    first, soon = [await client.post(path, json={"new_link": True}) for _ in range(2)]
    statuses = [first.status_code]
    for _ in range(19):
        await database.execute(earlier)
        statuses.append((await client.post(path, json={})).status_code)
    await database.execute(earlier)
    last = await client.post(path, json={"customer_email": ADDRESS})

    assert statuses == [200] * 20
    assert [each.json()["errors"][0]["code"] for each in (soon, last)] == ["too_many_emails"] * 2
    assert [each.headers.get("Retry-After") for each in (soon, last)] == ["60"] * 2
    assert len(await database.fetch(EMAILS)) == 21


async def test_withdrawn_request_gets_no_email(client, database, path):
    await client.post(path.replace("/email", "/withdrawal"))
    before = await database.fetch(EMAILS)

    answers = [await client.post(path, json=body) for body in ({}, {"customer_email": ADDRESS})]

    assert [each.json()["errors"][0]["code"] for each in answers] == ["withdrawn"] * 2
    assert await database.fetch(EMAILS) == before
