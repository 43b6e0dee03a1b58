"""`request find|correct|new-secret|erase`: the right customer gets a new link; nothing personal is left."""

import asyncio
import json
from typing import Any

import click
import httpx
import pytest

from service.calculation_requests.model import AlreadyErased, CalculationRequest
from service.command_line import connecting
from service.identifiers import new_request_id, uuid_of
from service.postgres.pool import Connection
from tests.harness import databases
from tests.harness.databases import has_waiting_statement
from tests.harness.examples import A_REQUEST, CONVEYANCER, FREE_CONVEYANCER
from tests.harness.stored import ANY_TEXTS, KEYS, QUEUED
from tests.harness.waiting import eventually
from tests.worker.commands.conftest import command, rendered
from tests.worker.conftest import created_event, hold_events, postman_held_before, store
from tests.worker.steps import (
    add_email,
    assert_sound,
    attempt_emails,
    calculate,
    intend,
    intend_email,
    key_of,
    states,
)
from worker.relay import pointers

pytestmark = pytest.mark.usefixtures("on_servers")

CORRECTING = ("--customer-email", "eve@example.com")
MARK = "Xq7personal"
# Every text that a caller may send.
MARKED: dict[str, Any] = {
    **dict.fromkeys(ANY_TEXTS, MARK),
    "customer_email": f"{MARK}@customer.example.com",
    "sender_email": f"{MARK}@firm.example.com",
    "meta_data": json.dumps({"of": MARK}),
    "calculation_fee_exempt": True,
}


async def opens(client: httpx.AsyncClient, uuid: str, secret: str) -> bool:
    answer = await client.get(f"/v1/request/{uuid}", headers={"Authorization": f"Bearer {secret}"})
    return {200: True, 401: False}[answer.status_code]


async def test_corrected_customer_gets_a_new_link_and_the_old_one_is_dead(
    client, database, postman, mail_server, intended
):
    await attempt_emails(database, postman)
    answer = await command("request", "correct", intended.uuid, *CORRECTING)
    await attempt_emails(database, postman)

    assert answer.text == f"{intended.uuid} has a new secret; e-mail {key_of(intended, 2)} is due"
    wrong, right = mail_server.accepted
    assert (wrong.recipients, right.recipients) == ([intended.customer_email], ["eve@example.com"])
    now = (await client.get(f"/v1/request/{intended.uuid}")).json()["data"]
    assert now["customer_email"] == "eve@example.com"
    body = right.message.get_body(("plain",))
    assert body is not None
    assert now["request_url"] in body.get_content().splitlines()
    assert await opens(client, intended.uuid, now["secret"])
    assert not await opens(client, intended.uuid, intended.secret_and_url(KEYS, "")[0])
    assert await database.fetchval("SELECT subject FROM operator_action") == key_of(intended, 2)
    await command("request", "new-secret", intended.uuid)
    changed = await database.fetch("SELECT data ->> 'changed' FROM event WHERE type = 'request.corrected'")
    assert changed == [("customer_email",), ("link",)]
    await assert_sound(database)


async def test_email_that_was_in_hand_stays_cancelled_and_another_follows(
    database, worker_settings, mail_server, mail_link, intended
):
    # The claim is not renewed meanwhile: the postman would notice that it has lost it.
    async with postman_held_before(b"RCPT", mail_link, worker_settings, email_claim_seconds=600.0):
        await command("request", "correct", intended.uuid, *CORRECTING)
        mail_link.resume()
        await eventually(lambda: database.fetchval("SELECT true FROM email WHERE state = 'sent'"))

    recipients = {mail.recipients[0] for mail in mail_server.accepted}
    assert recipients == {intended.customer_email, "eve@example.com"}
    rows = await database.fetch("SELECT number, state, reason FROM email ORDER BY number")
    assert rows == [(1, "failed", "cancelled"), (2, "sent", None)]
    await assert_sound(database)


@pytest.mark.parametrize("sends", [True, False])
async def test_email_that_has_not_begun_is_sent_once_or_never_whatever_becomes_of_the_event(
    *, database, pool, postman, mail_server, stored_request, sends
):
    words = [*CORRECTING, *([] if sends else ["--no-email"])]
    answer = await command("request", "correct", stored_request.uuid, *words)
    await intend_email(created_event(stored_request), pool=pool)
    await attempt_emails(database, postman)

    another = key_of(stored_request, 2)
    assert answer.text.endswith(f"e-mail {another} is due" if sends else "no e-mail is sent")
    sent = {another: "sent"} if sends else {}
    assert await states(database) == {key_of(stored_request): "failed"} | sent
    assert [mail.recipients for mail in mail_server.accepted] == ([["eve@example.com"]] if sends else [])
    await assert_sound(database)


async def test_email_that_a_consumer_is_adding_is_cancelled_and_replaced(
    database, other_connection, stored_request
):
    async with other_connection.transaction():
        await intend(other_connection, stored_request)
        renewing = asyncio.create_task(command("request", "new-secret", stored_request.uuid))
        await eventually(lambda: has_waiting_statement(database))
    await renewing

    assert await states(database) == {key_of(stored_request): "failed", key_of(stored_request, 2): "pending"}


async def test_correction_beside_a_resend_leaves_one_email_to_the_new_address(
    database, other_connection, refused
):
    async with other_connection.transaction():
        resent = await add_email(other_connection, refused, 2)
        changing = asyncio.create_task(command("request", "correct", refused.uuid, *CORRECTING))
        await eventually(lambda: has_waiting_statement(database))
    await changing
    resent_late = [await add_email(database, refused, number) for number in (2, 3, 4)]

    assert ([email.number for email in resent], resent_late) == ([2], [[], [], []])
    keys = [key_of(refused, number) for number in (1, 2, 3)]
    assert await states(database) == dict(zip(keys, ("failed", "failed", "pending"), strict=True))
    await assert_sound(database)


async def test_correction_to_the_same_address_changes_nothing(database, intended):
    before = await database.fetch("SELECT * FROM calculation_request")

    answer = await command("request", "correct", intended.uuid, "--customer-email", intended.customer_email)

    assert answer.status == 1
    assert answer.text.startswith(f"{intended.uuid} has this address already: nothing was changed. `python")
    assert await database.fetch("SELECT * FROM calculation_request") == before
    assert await states(database) == {key_of(intended): "pending"}
    assert await database.fetchval("SELECT count(*) FROM operator_action") == 0


@pytest.mark.parametrize(
    ("option", "value", "other"),
    [
        ("--customer-email", "ADA@bücher.example", "ada@buecher.example"),
        ("--external-id", "case-1 ", "case-10"),
        ("--case-ref", "12high STREET ", "12 Low Street"),
        ("--conveyancer", FREE_CONVEYANCER, CONVEYANCER),
    ],
)
async def test_requests_are_found_by_what_the_caller_on_the_phone_knows(database, option, value, other):
    fields = {"external_id": " case-1", "case_ref": f"{A_REQUEST['case_ref']} ".replace(" ", "\u00a0", 1)}
    spellings = ["Ada@bücher.example", "ada@Bücher.example", "ada@xn--bcher-kva.example"]
    known = [await store(database, customer_email=each, **fields) for each in spellings]
    await database.execute("UPDATE calculation_request SET conveyancer_id = $1", FREE_CONVEYANCER)
    await intend(database, known[2])
    await store(database, external_id="case-2", customer_email="eve@example.com", case_ref="another")

    found = await command("request", "find", option, value)
    newest = await command("request", "find", option, value, "--limit", "2")

    assert [each["uuid"] for each in found.data] == [each.id for each in reversed(known)]
    assert [each["email"] for each in found.data] == ["pending", None, None]
    assert (found.data[0]["case_ref"], found.note) == (fields["case_ref"], "")
    assert ".example" not in rendered(found).lower()
    assert (len(newest.data), newest.note) == (2, "2 of 3 are shown: --limit shows more.")
    if option != "--conveyancer":
        nothing = await command("request", "find", option, other)
        assert (nothing.data, nothing.text, nothing.note) == ([], "none", "")


async def erase(request: CalculationRequest) -> dict[str, Any]:
    erasure: dict[str, Any] = (await command("request", "erase", request.uuid)).data
    return erasure


async def test_several_requests_are_erased_at_once_and_each_is_reported(database):
    one, two, before, kept = [await store(database) for _ in range(4)]
    await erase(before)
    unknown = uuid_of(new_request_id())

    done = await command("request", "erase", one.uuid, before.uuid, two.uuid, one.uuid)
    mistyped = await command("request", "erase", unknown, before.uuid)

    results = {one.uuid: "erased", before.uuid: "erased before", two.uuid: "erased"}
    assert (done.status, done.data) == (0, results)
    assert done.text.splitlines() == [f"{uuid}: {result}" for uuid, result in results.items()]
    assert (mistyped.status, mistyped.data[unknown]) == (1, "no such request")
    assert await database.fetch("SELECT id FROM calculation_request") == [(kept.id,)]
    assert await database.fetchval("SELECT count(*) FROM operator_action") == 3


async def unpublished(database: Connection) -> list[dict[str, Any]]:
    return [dict(row) | {"data": json.loads(row["data"])} for row in await database.fetch(QUEUED)]


async def dump(database: Connection) -> str:
    tables = await database.fetch("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()")
    assert len(tables) >= 9
    rows = [
        row[0]
        for table in tables
        for row in await database.fetch(f"SELECT t::text FROM {table['tablename']} AS t")  # noqa: S608
    ]
    return "\n".join([*rows, json.dumps(await unpublished(database), default=str)])


async def test_nothing_personal_is_left_in_any_table(database, postman, mail_server):
    await store(database, external_id="another-case")
    request = await store(database, **MARKED)
    keyed = "UPDATE calculation_request SET idempotency_key = $2, idempotency_sha256 = $3 WHERE id = $1"
    await database.execute(keyed, request.id, f"of {MARK}", MARK.encode())
    await hold_events(database, request.id)
    mail_server.rcpt_reply = f"450 4.2.1 <{MARK}@customer.example.com> try later"
    await intend(database, request)
    await attempt_emails(database, postman)
    await calculate(database, request.uuid)
    assert MARK in await dump(database)
    assert MARK.encode().hex() in await dump(database)
    before = await unpublished(database)

    done = await erase(request)
    again = await erase(request)

    assert (done, again) == ({request.uuid: "erased"}, {request.uuid: "erased before"})
    left = await dump(database)
    assert MARK not in left
    assert MARK.encode().hex() not in left
    *after, erased = await unpublished(database)
    assert erased["type"] == "request.erased"
    assert erased["data"] == {"uuid": request.uuid, "tenant": request.conveyancer_id, "sequence": 4}
    chosen = [(event["data"].pop("external_id"), event["data"].pop("property_value")) for event in after]
    assert chosen == [("another-case", 300_000), *[(None, None)] * 3]
    assert [event["data"].pop("external_id") for event in before] == ["another-case", MARK, MARK]
    assert {event["data"].pop("property_value") for event in before} == {300_000}
    assert after[:-1] == before
    assert (after[-1]["type"], after[-1]["data"]["reason"]) == ("request.email_failed", "cancelled")
    assert await states(database) == {key_of(request): "failed"}
    await assert_sound(database)


async def test_late_messages_about_an_erased_request_change_nothing(database, pool, stored_request):
    await erase(stored_request)
    before = await dump(database)

    with pytest.raises(AlreadyErased):
        await calculate(database, stored_request.uuid)
    await intend_email(created_event(stored_request), pool=pool)

    assert await dump(database) == before


@pytest.mark.parametrize("table", ["calculation_request", "outbox"])
async def test_locked_row_is_named_soon(database, stored_request, monkeypatch, table):
    monkeypatch.setattr(connecting, "LOCK_SECONDS", 0.2)
    async with database.transaction():
        await database.execute(f"SELECT FROM {table} FOR UPDATE")
        async with asyncio.timeout(10.0):
            with pytest.raises(click.ClickException, match="has locked the same rows"):
                await erase(stored_request)


async def test_erasure_that_is_committed_while_a_relay_looks_for_events_is_not_undone(database, database_url):
    request = await store(database, external_id=MARK)
    worker, operator = databases.user_of("worker"), databases.user_of("operator")
    await database.execute(
        f"""
        ALTER TABLE outbox ENABLE ROW LEVEL SECURITY;
        CREATE POLICY slow ON outbox TO {worker} USING (pg_sleep(1) IS NOT NULL);
        CREATE POLICY fast ON outbox TO {operator} USING (true);
        """
    )
    is_looking = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep')"
    async with databases.connected(databases.as_role(database_url, "worker")) as relay, relay.transaction():
        locking = asyncio.create_task(pointers.lock(relay, pending=9, held=9))
        await eventually(lambda: database.fetchval(is_looking))
        await erase(request)
        assert not locking.done()
        events = await locking

    assert [event.request_id for event in events] == [request.id]
    assert MARK.encode() not in events[0].payload
