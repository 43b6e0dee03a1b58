"""Several postmen share the ledger by claims, and send no e-mail twice."""

import asyncio
from contextlib import AsyncExitStack

from tests.harness.in_process import running
from tests.harness.processes import started, worker_process
from tests.harness.waiting import eventually
from tests.worker.conftest import open_postman, settings_with
from tests.worker.mail.conftest import all_are, attempts, record_emails


async def test_email_under_way_is_not_claimed_again_by_its_own_process(
    worker_settings, mail_server, mail_link, database, intended
):
    mail_link.hold_before(b"Message-ID:")
    stop = asyncio.Event()
    stop.set()

    async with open_postman(settings_with(worker_settings, smtp_url=mail_link.url)) as postman:
        assert await postman.start_due() == 1
        await eventually(mail_link.marker_reached.is_set)
        await database.execute("UPDATE email SET next_attempt_at = now() - interval '1 second'")
        started_again = await postman.start_due()
        mail_link.resume()
        await postman.run(stop)  # It finishes the e-mails that it has claimed.

    assert started_again == 0
    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]
    assert await all_are(database, "sent")


async def test_two_postmen_send_no_email_twice_when_the_mail_server_takes_longer_than_a_claim(
    worker_settings, pool, mail_server, mail_link, database
):
    settings = settings_with(worker_settings, smtp_url=mail_link.url, email_claim_seconds=1.5)
    mail_link.hold_before(b"Message-ID:")
    await record_emails(database, pool, 3)

    async with AsyncExitStack() as resources:
        postmen = [await resources.enter_async_context(open_postman(settings)) for _ in range(2)]
        async with running(*(postman.run for postman in postmen)):
            await eventually(lambda: database.fetchval("SELECT every(claimed_by IS NOT NULL) FROM email"))
            first_claim_ends = await database.fetchval("SELECT max(next_attempt_at) FROM email")
            is_past = "SELECT clock_timestamp() > $1::timestamptz + interval '0.2 seconds'"
            await eventually(lambda: database.fetchval(is_past, first_claim_ends))
            mail_link.resume()
            await eventually(lambda: all_are(database, "sent"))

    assert len(mail_server.accepted) == 3
    assert await attempts(database) == 3


async def test_process_suspended_for_longer_than_its_claim_does_not_send_what_another_has_sent(
    worker_settings, mail_server, mail_link, database, tmp_path, intended
):
    settings = settings_with(worker_settings, email_claim_seconds=1.0, smtp_timeout_seconds=60.0)
    process = worker_process(settings_with(settings, smtp_url=mail_link.url), tmp_path)
    mail_link.hold_before(b"RCPT")

    async with started(process):
        await eventually(mail_link.marker_reached.is_set)
        process.freeze()
        async with open_postman(settings) as another, running(another.run):
            await eventually(lambda: all_are(database, "sent"))
        mail_link.resume()
        process.thaw()
        await eventually(lambda: "email_claim_lost" in process.output)

    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]
