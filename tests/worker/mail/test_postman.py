"""Postmen share the ledger by claims, send each e-mail once, and record and announce the outcome."""

import asyncio
import os
import signal
import time
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import asyncpg
import msgspec
import pytest

from deploy.local.machine.folders import Place
from deploy.local.servers.postgres_process import postgres_process
from deploy.local.servers.server import trouble_of_postgres
from service.calculation_requests.email_changes import EmailId
from service.outbox.events import RequestEmailFailed, RequestEmailSent
from tests.harness import databases, stored
from tests.harness.metrics import rises
from tests.harness.servers import KillableServer
from tests.harness.waiting import eventually, until
from tests.worker.conftest import postman_held_before, running_postman, settings_with, store, store_old
from tests.worker.steps import all_are, announced, assert_sound, attempt_emails, intend, record_emails
from worker.mail import ledger
from worker.mail.tokens import find

ATTEMPTS = "SELECT sum(attempts) FROM email"
CLAIMED = "SELECT count(claimed_by) FROM email"
REFUSED = {"reason": "refused", "smtp_code": 550}
UP_FOR_A_DAY = "UPDATE postgres_up SET since = now() - interval '1 day'"


async def test_email_sent_again_is_equal_but_for_its_date(worker_settings, mail_server, database, intended):
    keys = worker_settings.request_secret_keys
    await database.execute("UPDATE email SET created_at = now() - interval '1 day'")
    async with running_postman(worker_settings):
        await eventually(lambda: all_are(database, "sent"))
    async with running_postman(worker_settings, request_secret_keys=f"new:{'A' * 43},{keys}"):
        await database.execute("UPDATE email SET state = 'pending', next_attempt_at = now()")
        await eventually(lambda: len(mail_server.accepted) == 2)

    first, second = (mail.message for mail in mail_server.accepted)
    assert all(datetime.now(UTC) - mail["Date"].datetime < timedelta(minutes=5) for mail in (first, second))
    del first["Date"], second["Date"]
    assert first.as_bytes() == second.as_bytes()
    assert find(first["Message-ID"], stored.KEYS) == EmailId(intended.id, 1, "invitation")
    assert first["From"] == worker_settings.mail_from


@pytest.mark.parametrize(
    ("reply", "counted_as", "failure"),
    [
        ("250 OK queued as 4711", "sent", {}),
        ("550 5.1.1 No such user ada@customer.example.com", "recipient_refused", REFUSED),
        ("550 5.7.1 Taken for spam", "failed", REFUSED),
    ],
)
async def test_ended_email_is_announced_counted_and_logged_without_the_words_of_the_mail_server(
    postman, mail_server, database, intended, *, reply, counted_as, failure, logs
):
    mail_server.data_reply = reply
    state, event = ("failed", RequestEmailFailed) if failure else ("sent", RequestEmailSent)

    with rises("emails_total", outcome=counted_as):
        await attempt_emails(database, postman)
        assert await postman.claim_due() == 0

    email = await database.fetchrow("SELECT server_reply, attempts, claimed_by FROM email")
    assert email == (reply.removeprefix("250 "), 1, None)
    ended = intended.event(event, sequence=2, email=1, kind="invitation", **failure)
    assert await announced(database) == [(ended.type, msgspec.to_builtins(ended))]
    [line] = logs
    assert line["event"] == "email_handled"
    assert (line["outcome"], line["smtp_code"]) == (state, 550 if failure else 0)
    assert reply[4:] not in str(line)


async def test_email_that_cannot_be_composed_fails_or_waits_for_its_key(postman, mail_server, database):
    sound, *requests = await record_emails(database, 5)
    faults = (
        *("customer_email = '=?utf-8?q?a?=@example.com'", "customer_email = 'adé@example.com'"),
        *("sender_email = 'no address'", "secret_key_id = 'lost'"),
    )
    for request, fault in zip(requests, faults, strict=True):
        change = f"UPDATE calculation_request SET {fault} WHERE id = $1"  # noqa: S608 - a constant
        await database.execute(change, request.id)

    with rises("emails_total", outcome="internal_error"), rises("request_secret_keys_missing_total"):
        await attempt_emails(database, postman)
        assert await postman.claim_due() == 0

    states = await database.fetch("SELECT state, count(*) FROM email GROUP BY state")
    assert dict(states) == {"failed": 3, "sent": 1, "pending": 1}
    assert [mail.recipients for mail in mail_server.accepted] == [[sound.customer_email]]
    failures = [event for kind, event in await announced(database) if kind == RequestEmailFailed.type]
    assert [(each["reason"], each["smtp_code"]) for each in failures] == [("not_composable", 0)] * 3


async def test_delay_of_a_requests_first_email_is_measured_from_the_create(postman, database):
    request = await store_old(database, datetime.now(UTC) - timedelta(minutes=10))
    await intend(database, request, emails=2)

    measured = "email_delivery_seconds_bucket"
    with rises(measured, le="300.0"), rises(measured, le="1800.0", by=2):
        await attempt_emails(database, postman)


async def test_postman_sends_no_more_emails_at_once_than_allowed(worker_settings, mail_link, database):
    # A reply that is late on a busy machine must not cost a connection.
    limits = {"email_concurrency": 2, "smtp_timeout_seconds": 60.0}
    mail_link.hold_before(b"Message-ID:")
    await record_emails(database, 5)

    async with running_postman(worker_settings, smtp_url=mail_link.url, **limits) as postman:
        await eventually(lambda: database.fetchval(f"{CLAIMED} HAVING count(claimed_by) = 4"))
        await eventually(lambda: mail_link.connections == 2)
        claimed_more = await postman.claim_due()
        mail_link.resume()
        await eventually(lambda: all_are(database, "sent"))

    assert (claimed_more, mail_link.connections) == (0, 2)


async def test_postman_keeps_to_the_rate(worker_settings, database):
    await record_emails(database, 6)

    began = time.monotonic()
    async with running_postman(worker_settings, email_rate=4.0):
        await eventually(lambda: all_are(database, "sent"))

    assert time.monotonic() - began >= (6 - 1) / 4


@pytest.mark.usefixtures("intended")
@pytest.mark.parametrize(
    ("held_before", "resumed_after", "shutdown_seconds", "left"),
    [
        (b"Message-ID:", 1.0, 20.0, ("sent", False, 1)),  # It waits long for the reply to the content.
        (b"RCPT", 0.05, 20.0, ("pending", False, 0)),  # Another process may send it at once.
        (b"Message-ID:", 60.0, 0.4, ("pending", True, 0)),  # Its content may have been accepted.
    ],
    ids=["reply in time", "no content yet", "no reply"],
)
async def test_stopping_postman_sends_no_further_content_and_claims_what_it_has_sent(
    *, worker_settings, mail_server, mail_link, database, held_before, resumed_after, shutdown_seconds, left
):
    async with postman_held_before(
        held_before, mail_link, worker_settings, shutdown_seconds=shutdown_seconds
    ):
        asyncio.get_running_loop().call_later(resumed_after, mail_link.resume)

    email = await database.fetchrow("SELECT state, claimed_by IS NOT NULL, attempts FROM email")
    assert (email, len(mail_server.accepted)) == (left, left[2])


async def test_expired_claims_are_left_alone_for_as_long_again_after_crash_recovery_and_a_restart(tmp_path):
    async def claims(connection: asyncpg.Connection, *, seconds: float) -> int:
        """Claim what is due, for *seconds*. Returns the number of e-mails claimed."""
        emails, _ = await ledger.claim(connection, uuid4(), under_way=[], limit=10, seconds=seconds)
        return len(emails)

    with postgres_process(Place(folder=tmp_path, keep=True)) as started:
        server = KillableServer(started, trouble_of_postgres)
        async with databases.connected(server.url) as connection:
            await databases.prepare(connection)
            await intend(connection, await store(connection))
            expired = "claimed_by = gen_random_uuid(), next_attempt_at = now() - interval '1 s'"
            await connection.execute(f"UPDATE email SET {expired}")  # noqa: S608 - a constant
            await connection.execute(UP_FOR_A_DAY)
        victim, witness = await asyncpg.connect(server.url), await asyncpg.connect(server.url)
        os.kill(victim.get_server_pid(), signal.SIGKILL)
        await eventually(witness.is_closed)

        await server.wait_for_answer()
        async with databases.connected(server.url) as connection:
            half = "SELECT extract(epoch FROM now() - pg_postmaster_start_time())::float / 2"
            assert await claims(connection, seconds=await connection.fetchval(half)) == 0
            await eventually(lambda: claims(connection, seconds=0.1))
            await connection.execute(UP_FOR_A_DAY)

        await asyncio.to_thread(server.process.stop)
        await server.start()
        async with databases.connected(server.url) as connection:
            assert await connection.fetchval("SELECT count(*) FROM postgres_up") == 1
            assert await claims(connection, seconds=60.0) == 0


async def test_email_under_way_is_claimed_once(worker_settings, mail_server, mail_link, database, intended):
    async with postman_held_before(b"Message-ID:", mail_link, worker_settings) as postman:
        await database.execute("UPDATE email SET next_attempt_at = now() - interval '1 second'")
        claimed_again = await postman.claim_due()
        mail_link.resume()

    assert claimed_again == 0
    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]
    assert await all_are(database, "sent")


async def test_slow_mail_server_gets_no_email_twice(worker_settings, mail_server, mail_link, database):
    settings = settings_with(worker_settings, smtp_url=mail_link.url, email_claim_seconds=1.5)
    mail_link.hold_before(b"Message-ID:")
    await record_emails(database, 3)

    async with running_postman(settings), running_postman(settings):
        await eventually(lambda: database.fetchval("SELECT every(claimed_by IS NOT NULL) FROM email"))
        first_claim_ends = await database.fetchval("SELECT max(next_attempt_at) FROM email")
        is_past = "SELECT clock_timestamp() > $1::timestamptz + interval '0.2 seconds'"
        await eventually(lambda: database.fetchval(is_past, first_claim_ends))
        mail_link.resume()
        await eventually(lambda: all_are(database, "sent"))

    assert len(mail_server.accepted) == await database.fetchval(ATTEMPTS) == 3


@pytest.mark.usefixtures("intended")
@pytest.mark.parametrize(
    "change",
    [
        "claimed_by = gen_random_uuid(), next_attempt_at = 'infinity'",
        "claimed_by = NULL, state = 'failed', reason = 'cancelled'",
    ],
    ids=["taken over", "cancelled"],
)
async def test_lost_claim_is_left_alone(*, worker_settings, mail_server, mail_link, database, logs, change):
    """It is not used from the next renewal on, which is long before it expires."""
    async with postman_held_before(b"RCPT", mail_link, worker_settings, email_claim_seconds=6.0):
        row = await database.fetch(f"UPDATE email SET {change} RETURNING *")  # noqa: S608 - constants only
        await asyncio.sleep(2.5)
        mail_link.resume()
        await eventually(lambda: "email_claim_lost" in str(logs), seconds=3.0)

    assert mail_server.accepted == []
    assert await database.fetch("SELECT * FROM email") == row


async def test_emails_without_a_request_delay_no_others_and_are_found(worker_settings, mail_server, database):
    """As after a deletion with psql, which leaves the ledger as it is."""
    await database.execute(
        "INSERT INTO email (request_id, number, kind, next_attempt_at)"
        " SELECT gen_random_uuid(), 1, 'invitation', now() - interval '1 hour' FROM generate_series(1, 2000)"
    )
    await record_emails(database, 20)

    async with running_postman(worker_settings):
        assert await until(lambda: len(mail_server.accepted) == 20, seconds=20.0)

    await assert_sound(database, found=["email_without_request"])
    assert await database.fetchval(CLAIMED) == 0


async def test_locked_requests_delay_no_others(
    worker_settings, mail_server, mail_link, database, database_url
):
    """Their e-mails are sent once, and recorded later."""
    await record_emails(database, 100)
    twenty_are_sent = "SELECT count(*) = 20 FROM email WHERE state = 'sent'"
    async with postman_held_before(b"Message-ID:", mail_link, worker_settings, email_concurrency=2):
        async with databases.connected(database_url) as holder, holder.transaction():
            await holder.execute("SELECT FROM calculation_request FOR UPDATE")
            mail_link.resume()
            await eventually(lambda: mail_server.accepted)
            await record_emails(database, 20)
            assert await until(lambda: database.fetchval(twenty_are_sent), seconds=20.0)
            assert len(mail_server.accepted) < 20 + 16  # A few were under way.
        await eventually(lambda: all_are(database, "sent"))

    assert len({mail.message["Message-ID"] for mail in mail_server.accepted}) == len(mail_server.accepted)
    assert await database.fetchval(ATTEMPTS) == 120
    await assert_sound(database)
