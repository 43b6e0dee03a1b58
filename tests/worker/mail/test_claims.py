"""Postmen share the ledger by claims and send no e-mail twice, even after a crash or restart of Postgres."""

import asyncio
import os
import signal
from uuid import uuid4

import asyncpg
import pytest

from deploy.local.machine.folders import Place
from deploy.local.servers.postgres_process import postgres_process
from deploy.local.servers.server import trouble_of_postgres
from tests.harness import databases
from tests.harness.servers import KillableServer
from tests.harness.waiting import eventually, until
from tests.worker.conftest import postman_held_before, running_postman, settings_with, store
from tests.worker.mail.conftest import all_are, attempts, is_claimed, record_emails
from tests.worker.steps import assert_sound, intend
from worker.mail import ledger

UP_FOR_A_DAY = "UPDATE postgres_up SET since = now() - interval '1 day'"


@pytest.fixture
async def server(tmp_path):
    """A Postgres server that keeps its data over restarts, with an e-mail whose claim has expired."""
    with postgres_process(Place(folder=tmp_path, keep=True)) as started:
        async with databases.connected(started.url) as connection:
            await databases.prepare(connection)
            await intend(connection, await store(connection))
            claimed = (
                "UPDATE email SET claimed_by = gen_random_uuid(), next_attempt_at = now() - interval '1 s'"
            )
            await connection.execute(claimed)
            await connection.execute(UP_FOR_A_DAY)
        yield KillableServer(started, trouble_of_postgres)


async def claims(connection, *, seconds: float) -> int:
    """Claim what is due, for *seconds*. Returns the number of e-mails claimed."""
    emails, _ = await ledger.claim(connection, uuid4(), under_way=[], limit=10, seconds=seconds)
    return len(emails)


async def test_expired_claims_are_left_alone_for_as_long_again_after_crash_recovery_and_a_restart(server):
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


async def test_two_postmen_send_no_email_twice_when_the_mail_server_takes_longer_than_a_claim(
    worker_settings, mail_server, mail_link, database
):
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

    assert len(mail_server.accepted) == 3
    assert await attempts(database) == 3


@pytest.mark.usefixtures("intended")
@pytest.mark.parametrize(
    "change",
    [
        "claimed_by = gen_random_uuid(), next_attempt_at = 'infinity'",
        "claimed_by = NULL, state = 'failed', reason = 'cancelled'",
    ],
    ids=["taken over", "cancelled"],
)
async def test_claim_that_was_lost_is_neither_used_nor_renewed_nor_released(
    *, worker_settings, mail_server, mail_link, database, logs, change
):
    """It is not used from the next renewal on, which is long before it expires."""
    async with postman_held_before(b"RCPT", mail_link, worker_settings, email_claim_seconds=6.0):
        row = await database.fetch(f"UPDATE email SET {change} RETURNING *")  # noqa: S608 - constants only
        await asyncio.sleep(2.5)
        mail_link.resume()
        await eventually(lambda: "email_claim_lost" in str(logs), seconds=3.0)

    assert mail_server.accepted == []
    assert await database.fetch("SELECT * FROM email") == row


async def test_pending_emails_whose_requests_are_gone_delay_no_others_and_are_found(
    worker_settings, mail_server, database
):
    """As after a deletion with psql, which leaves the ledger as it is."""
    await database.execute(
        """
        INSERT INTO email (request_id, number, kind, next_attempt_at)
        SELECT gen_random_uuid(), 1, 'invitation', now() - interval '1 hour'
          FROM generate_series(1, 2000)
        """
    )
    await record_emails(database, 20)

    async with running_postman(worker_settings):
        assert await until(lambda: len(mail_server.accepted) == 20, seconds=5.0)

    await assert_sound(database, found=["email_without_request"])
    assert not await is_claimed(database)


async def test_locked_requests_delay_no_others_and_their_emails_are_sent_once_and_recorded_later(
    worker_settings, mail_server, mail_link, database, other_connection
):
    await record_emails(database, 300)
    twenty_are_sent = "SELECT count(*) = 20 FROM email WHERE state = 'sent'"
    async with postman_held_before(b"Message-ID:", mail_link, worker_settings, email_concurrency=2):
        async with other_connection.transaction():
            await other_connection.execute("SELECT FROM calculation_request FOR UPDATE")
            mail_link.resume()
            await eventually(lambda: mail_server.accepted)
            await record_emails(database, 20)
            assert await until(lambda: database.fetchval(twenty_are_sent), seconds=5.0)
            assert len(mail_server.accepted) < 20 + 16  # A few were under way.
        await eventually(lambda: all_are(database, "sent"))

    assert len(mail_server.accepted) == len({mail.message["Message-ID"] for mail in mail_server.accepted})
    assert await attempts(database) == 320
    await assert_sound(database)
