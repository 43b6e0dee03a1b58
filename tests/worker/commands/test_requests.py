"""`request find|correct|new-secret|erase`, and RETENTION_DAYS, after which what is older is erased, once."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import click
import pytest
from msgspec.structs import replace

from service.calculation_requests.model import AlreadyErased, CalculationRequest
from service.command_line import connecting
from service.identifiers import new_request_id, uuid_of
from service.postgres.pool import Connection
from tests.harness import databases
from tests.harness.databases import count_waiting_statements
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER
from tests.harness.in_process import running
from tests.harness.stored import ANY_TEXTS, KEYS, QUEUED
from tests.harness.waiting import eventually
from tests.worker import steps
from tests.worker.commands.conftest import command, rendered
from tests.worker.conftest import created_event, hold_events, postman_held_before, store, store_old
from worker import retention
from worker.process import ROLES
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


async def test_correction_sends_a_new_link_and_ends_the_old(client, database, postman, mail_server, intended):
    async def status(secret: str) -> int:
        headers = {"Authorization": f"Bearer {secret}"}
        return (await client.get(f"/v1/request/{intended.uuid}", headers=headers)).status_code

    before = await database.fetch("SELECT * FROM calculation_request")
    same = await command("request", "correct", intended.uuid, "--customer-email", intended.customer_email)
    unchanged = await database.fetch("SELECT * FROM calculation_request")
    await steps.attempt_emails(database, postman)
    answer = await command("request", "correct", intended.uuid, *CORRECTING)
    await steps.attempt_emails(database, postman)
    now = (await client.get(f"/v1/request/{intended.uuid}")).json()["data"]
    statuses = [await status(each) for each in (now["secret"], intended.secret_and_url(KEYS, "")[0])]
    await command("request", "new-secret", intended.uuid)

    assert (same.status, unchanged) == (1, before)
    assert same.text.startswith(f"{intended.uuid} has this address already: nothing was changed. `python")
    assert answer.text == f"{intended.uuid} has a new secret; e-mail {steps.key_of(intended, 2)} is due"
    wrong, right = mail_server.accepted
    assert (wrong.recipients, right.recipients) == ([intended.customer_email], ["eve@example.com"])
    assert now["customer_email"] == "eve@example.com"
    assert now["request_url"] in str(right.message.get_body(("plain",))).splitlines()
    assert statuses == [200, 401]
    subjects = await database.fetch("SELECT subject FROM operator_action ORDER BY id")
    assert subjects == [(steps.key_of(intended, 2),), (steps.key_of(intended, 3),)]
    changed = await database.fetch("SELECT data ->> 'changed' FROM event WHERE type = 'request.corrected'")
    assert changed == [("customer_email",), ("link",)]
    await steps.assert_sound(database)


async def test_email_in_hand_stays_cancelled(database, worker_settings, mail_server, mail_link, intended):
    # The claim is not renewed meanwhile: the postman would notice that it has lost it.
    async with postman_held_before(b"RCPT", mail_link, worker_settings, email_claim_seconds=600.0):
        await command("request", "correct", intended.uuid, *CORRECTING)
        mail_link.resume()
        await eventually(lambda: database.fetchval("SELECT true FROM email WHERE state = 'sent'"))

    recipients = {mail.recipients[0] for mail in mail_server.accepted}
    assert recipients == {intended.customer_email, "eve@example.com"}
    rows = await database.fetch("SELECT number, state, reason FROM email ORDER BY number")
    assert rows == [(1, "failed", "cancelled"), (2, "sent", None)]
    await steps.assert_sound(database)


async def test_email_not_begun_is_sent_once_or_never_whatever_becomes_of_the_event(
    database, pool, postman, mail_server
):
    once, never = await steps.store_many(database, 2)
    answers = [
        await command("request", "correct", once.uuid, *CORRECTING),
        await command("request", "correct", never.uuid, *CORRECTING, "--no-email"),
    ]
    for request in (once, never):
        await steps.intend_email(created_event(request), pool=pool)
    await steps.attempt_emails(database, postman)

    failed = {steps.key_of(request): "failed" for request in (once, never)}
    another = steps.key_of(once, 2)
    ends = [answer.text.partition("; ")[2] for answer in answers]
    assert ends == [f"e-mail {another} is due", "no e-mail is sent"]
    assert await steps.states(database) == failed | {another: "sent"}
    assert [mail.recipients for mail in mail_server.accepted] == [["eve@example.com"]]
    await steps.assert_sound(database)


async def test_change_beside_an_added_email_leaves_one_with_new_link(database, other_connection, refused):
    """A consumer, or an operator who resends, is adding an e-mail at the same time."""

    async def both_wait() -> bool:
        return await count_waiting_statements(database) == 2

    new = await store(database)
    async with other_connection.transaction():
        await steps.intend(other_connection, new)
        assert await steps.add_email(other_connection, refused, 2)
        every = (("new-secret", new.uuid), ("correct", refused.uuid, *CORRECTING))
        changing = [asyncio.create_task(command("request", *words)) for words in every]
        await eventually(both_wait)
    await asyncio.gather(*changing)

    assert [await steps.add_email(database, refused, number) for number in (2, 3, 4)] == [[], [], []]
    pending = {steps.key_of(new, 2), steps.key_of(refused, 3)}
    states = await steps.states(database)
    assert {key for key in states if states[key] == "pending"} == pending
    assert len(states) == 5
    await steps.assert_sound(database)


async def test_requests_are_found_by_what_the_caller_on_the_phone_knows(database):
    fields = {"external_id": " case-1", "case_ref": f"{A_REQUEST['case_ref']} ".replace(" ", "\u00a0", 1)}
    spellings = ["Ada@bücher.example", "ada@Bücher.example", "ada@xn--bcher-kva.example"]
    known = [await store(database, customer_email=each, **fields) for each in spellings]
    await database.execute("UPDATE calculation_request SET conveyancer_id = $1", FREE_CONVEYANCER)
    await steps.intend(database, known[2])
    await store(database, external_id="case-2", customer_email="eve@example.com", case_ref="another")

    for option, value, other in (
        ("--customer-email", "ADA@bücher.example", "ada@buecher.example"),
        ("--external-id", "case-1 ", "case-10"),
        ("--case-ref", "12high STREET ", "12 Low Street"),
        ("--conveyancer", FREE_CONVEYANCER, None),
    ):
        found = await command("request", "find", option, value)
        newest = await command("request", "find", option, value, "--limit", "2")

        emails = ["pending", None, None]
        listed = [(each["uuid"], each["email"], each["case_ref"]) for each in found.data]
        assert listed == [(known[2 - place].id, emails[place], fields["case_ref"]) for place in range(3)]
        assert ".example" not in rendered(found).lower()
        assert (found.note, newest.note) == ("", "2 of 3 are shown: --limit shows more.")
        assert newest.data == found.data[:2]
        if other is not None:
            nothing = await command("request", "find", option, other)
            assert (nothing.data, nothing.text, nothing.note) == ([], "none", "")


async def test_several_requests_are_erased_at_once_and_each_is_reported(database):
    one, two, before, kept = [await store(database) for _ in range(4)]
    await command("request", "erase", before.uuid)
    unknown = uuid_of(new_request_id())

    done = await command("request", "erase", one.uuid, before.uuid, two.uuid, one.uuid)
    mistyped = await command("request", "erase", unknown, before.uuid)

    results = {one.uuid: "erased", before.uuid: "erased before", two.uuid: "erased"}
    assert (done.status, done.data) == (0, results)
    assert done.text.splitlines() == [f"{uuid}: {result}" for uuid, result in results.items()]
    assert (mistyped.status, mistyped.data[unknown]) == (1, "no such request")
    assert await database.fetch("SELECT id FROM calculation_request") == [(kept.id,)]
    assert await database.fetchval("SELECT count(*) FROM operator_action") == 3


async def unpublished(database: Connection) -> list[tuple[str, dict[str, Any]]]:
    return [(row["type"], json.loads(row["data"])) for row in await database.fetch(QUEUED)]


async def dump(database: Connection) -> str:
    tables = await database.fetch("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()")
    assert len(tables) >= 9
    queries = [f"SELECT t::text FROM {table['tablename']} AS t" for table in tables]  # noqa: S608
    return "\n".join([row[0] for query in queries for row in await database.fetch(query)])


async def test_nothing_personal_is_left_in_any_table(database, pool, postman, mail_server):
    await store(database, external_id="another-case")
    request = await store(database, **MARKED)
    keyed = "UPDATE calculation_request SET idempotency_key = $2, idempotency_sha256 = $3 WHERE id = $1"
    await database.execute(keyed, request.id, f"of {MARK}", MARK.encode())
    await hold_events(database, request.id)
    mail_server.rcpt_reply = f"450 4.2.1 <{MARK}@customer.example.com> try later"
    await steps.intend(database, request)
    await steps.attempt_emails(database, postman)
    await steps.calculate(database, request.uuid)
    all_before, before = await dump(database), await unpublished(database)

    done = [(await command("request", "erase", request.uuid)).data for _ in range(2)]
    left, (*after, (failed, failure), erased) = await dump(database), await unpublished(database)
    with pytest.raises(AlreadyErased):
        await steps.calculate(database, request.uuid)
    await steps.intend_email(created_event(request), pool=pool)

    assert done == [{request.uuid: "erased"}, {request.uuid: "erased before"}]
    assert [(word in all_before, word in left) for word in (MARK, MARK.encode().hex())] == [(True, False)] * 2
    assert [data["external_id"] for _, data in before] == ["another-case", MARK, MARK]
    nothing: dict[str, Any] = {"external_id": None, "property_value": None}
    assert after == [before[0], *((kind, data | nothing) for kind, data in before[1:])]
    assert (failed, failure["reason"]) == ("request.email_failed", "cancelled")
    assert nothing.items() <= failure.items()
    data = {"uuid": request.uuid, "tenant": request.conveyancer_id, "sequence": 4}
    assert erased == ("request.erased", data)
    assert await steps.states(database) == {steps.key_of(request): "failed"}
    assert await dump(database) == left
    await steps.assert_sound(database)


@pytest.mark.parametrize("table", ["calculation_request", "outbox"])
async def test_locked_row_is_named_soon(database, stored_request, monkeypatch, table):
    monkeypatch.setattr(connecting, "LOCK_SECONDS", 0.2)
    async with database.transaction():
        await database.execute(f"SELECT FROM {table} FOR UPDATE")
        async with asyncio.timeout(10.0):
            with pytest.raises(click.ClickException, match="has locked the same rows"):
                await command("request", "erase", stored_request.uuid)


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
        await command("request", "erase", request.uuid)
        assert not locking.done()
        events = await locking

    assert [event.request_id for event in events] == [request.id]
    assert MARK.encode() not in events[0].payload


DAYS = 100


@pytest.fixture
def erase_old(worker_settings, pool, relay_waker):
    settings = replace(worker_settings, retention_days=DAYS)
    return lambda: retention.erase_old(settings, pool, relay_waker, asyncio.Event())


async def store_aged(database, days: int, number: int = 0) -> CalculationRequest:
    return await store_old(database, datetime.now(UTC) - timedelta(days=days), number)


async def kept(database) -> set[UUID]:
    return {row["id"] for row in await database.fetch("SELECT id FROM calculation_request")}


async def test_two_workers_erase_each_older_request_once_and_no_other(database, erase_old):
    for number in range(10):
        await store_aged(database, DAYS + 1, number)
    young = {(await store_aged(database, DAYS - 1, number)).id for number in range(3)}

    await asyncio.gather(erase_old(), erase_old())
    await erase_old()

    assert await kept(database) == young
    assert await database.fetchval("SELECT count(*) FROM erased_request") == 10
    assert await database.fetchval("SELECT count(*) FROM event WHERE type = 'request.email_failed'") == 10
    await steps.assert_sound(database, found=["email_overdue"])  # Nothing sends the e-mails of the young.


async def test_round_erases_few_requests_and_the_oldest(database, erase_old):
    stored = [(await store_aged(database, DAYS + 20 - number)).id for number in range(12)]

    await erase_old()
    assert await kept(database) == set(stored[10:])
    await erase_old()

    assert await kept(database) == set()


async def test_nothing_is_erased_while_the_clocks_of_postgres_and_of_this_machine_differ(database):
    old = await store_aged(database, DAYS + 1)
    before = await retention.find_oldest(database, DAYS)
    await database.execute(
        "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql "
        "RETURN pg_catalog.clock_timestamp() + interval '2 min'"
    )
    await database.execute("SET search_path = public, pg_catalog")

    assert before == [old.id]
    assert await retention.find_oldest(database, DAYS) == []


@pytest.mark.parametrize(
    ("table", "column"), [("calculation_request", "id"), ("email", "request_id"), ("outbox", "request_id")]
)
async def test_locked_row_holds_up_no_other_request(database, erase_old, other_connection, table, column):
    locked, _ = [await store_aged(database, DAYS + 1, number) for number in (3, 4)]
    await steps.intend(database, locked)

    async with other_connection.transaction():
        await other_connection.execute(f"SELECT FROM {table} WHERE {column} = $1 FOR UPDATE", locked.id)
        await erase_old()
        assert await kept(database) == {locked.id}
    await erase_old()

    assert await kept(database) == set()
    await steps.assert_sound(database)


async def test_rounds_begin_by_themselves_if_asked_for(worker_settings, database, pool, relay_waker):
    await store_aged(database, 40)
    settings = [replace(worker_settings, retention_days=days) for days in (None, 30)]
    never, asked_for = (ROLES["relay"].assemble(each, pool, relay_waker)[0] for each in settings)

    assert "retention" not in never
    async with running(asked_for["retention"]):
        await eventually(lambda: database.fetchval("SELECT count(*) = 0 FROM calculation_request"))
