"""The postman sends the due e-mails of the ledger, and records and announces the outcome."""

import asyncio
import time

import msgspec
import pytest

from service.outbox.events import RequestEmailSent
from tests.harness.in_process import running
from tests.harness.waiting import eventually
from tests.worker.conftest import open_postman, settings_with
from tests.worker.mail.conftest import (
    all_are,
    announced,
    attempts,
    is_claimed,
    record_emails,
    states,
)


async def test_email_is_addressed_to_the_customer_and_replies_go_to_the_sender(
    postman, mail_server, intended
):
    async with running(postman.run):
        await eventually(lambda: mail_server.accepted)

    (mail,) = mail_server.accepted
    assert mail.recipients == ["ada@customer.example.com"]
    assert mail.message["To"] == "Ada Lovelace <ada@customer.example.com>"
    assert mail.message["From"] == "Calculations <calculations@service.example.com>"
    assert mail.message["Reply-To"] == "Grace Hopper <grace@firm.example.com>"
    assert mail.message["Subject"] == "Your Stamp Duty Land Tax calculation for Acme"
    assert mail.message["Auto-Submitted"] == "auto-generated"
    assert mail.message["Message-ID"] == f"<{intended.uuid}.request.created.1@service.example.com>"


async def test_email_that_is_sent_again_has_the_same_message_id_date_and_text(
    postman, mail_server, database, intended
):
    async with running(postman.run):
        await eventually(lambda: all_are(database, "sent"))
        await database.execute("UPDATE email SET state = 'pending', next_attempt_at = now()")
        await eventually(lambda: len(mail_server.accepted) == 2)

    first, second = (
        [
            mail.message["Message-ID"],
            mail.message["Date"],
            *(part.get_payload() for part in mail.message.walk()),
        ]
        for mail in mail_server.accepted
    )
    assert first[:2] == second[:2]
    assert first[3:] == second[3:]
    assert intended.uuid in str(first[0])


async def test_accepted_email_is_sent_and_announced(postman, mail_server, database, intended):
    mail_server.data_reply = "250 OK queued as 4711"

    async with running(postman.run):
        await eventually(lambda: all_are(database, "sent"))

    email = await database.fetchrow("SELECT * FROM email")
    assert email is not None
    assert (email["server_reply"], email["attempts"], email["claimed_by"]) == ("OK queued as 4711", 1, None)
    ((event_type, sequence, payload),) = await announced(database)
    assert (event_type, sequence) == ("request.email_sent", 2)
    sent = RequestEmailSent(**intended.event_payload(sequence=2))
    assert msgspec.json.decode(payload)["data"] == msgspec.to_builtins(sent)
    assert await database.fetchval("SELECT sequence FROM calculation_request") == 2


@pytest.mark.parametrize("reply", [b"250 OK \xe9", b"250 OK \x00 done"], ids=["Latin-1", "NUL"])
async def test_acceptance_in_any_encoding_is_recorded_and_the_email_sent_once(
    worker_settings, rude_server, database, intended, *, reply
):
    rude_server.replies["content"] = reply
    settings = settings_with(worker_settings, smtp_url=rude_server.url, email_claim_seconds=1.0)

    async with open_postman(settings) as postman, running(postman.run):
        await eventually(lambda: all_are(database, "sent"))

    assert len(rude_server.contents) == 1
    assert intended.uuid.encode() in rude_server.contents[0]


async def test_email_is_sent_while_the_outcome_of_another_is_recorded(
    worker_settings, pool, mail_server, database, other_connection
):
    settings = settings_with(worker_settings, email_concurrency=1)
    await record_emails(database, pool, 2)

    locking = other_connection.transaction()
    await locking.start()
    await other_connection.execute("SELECT FROM calculation_request FOR UPDATE")

    async with open_postman(settings) as postman, running(postman.run):
        await eventually(lambda: len(mail_server.accepted) == 2)
        assert await states(database) == {"pending": 2}
        await locking.rollback()
        await eventually(lambda: all_are(database, "sent"))

    assert (len(mail_server.accepted), await attempts(database)) == (2, 2)


async def test_postman_sends_no_more_emails_at_once_than_its_setting_allows(
    worker_settings, pool, mail_link, database
):
    settings = settings_with(worker_settings, smtp_url=mail_link.url, email_concurrency=2)
    mail_link.hold_before(b"Message-ID:")
    await record_emails(database, pool, 5)

    async with open_postman(settings) as postman:
        started = [await postman.start_due() for _ in range(3)]
        await mail_link.marker_reached.wait()
        mail_link.resume()
        async with running(postman.run):
            await eventually(lambda: all_are(database, "sent"))

    assert started == [4, 0, 0]
    assert mail_link.connections == 2


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [({}, 0.05), ({"shutdown_seconds": 5.0}, 3.0)],
    ids=["soon", "nearly as late as it may"],
)
async def test_stopping_postman_waits_for_the_reply_to_a_content_that_was_sent(
    *, worker_settings, mail_server, mail_link, database, intended, changes, seconds
):
    mail_link.hold_before(b"Message-ID:")
    settings = settings_with(worker_settings, smtp_url=mail_link.url, **changes)

    async with open_postman(settings) as postman, running(postman.run):
        await eventually(mail_link.marker_reached.is_set)
        asyncio.get_running_loop().call_later(seconds, mail_link.resume)

    assert await states(database) == {"sent": 1}
    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]


@pytest.mark.usefixtures("intended")
async def test_stopping_postman_sends_no_further_content(worker_settings, mail_server, mail_link, database):
    mail_link.hold_before(b"RCPT")

    async with (
        open_postman(settings_with(worker_settings, smtp_url=mail_link.url)) as postman,
        running(postman.run),
    ):
        await eventually(mail_link.marker_reached.is_set)
        asyncio.get_running_loop().call_later(0.05, mail_link.resume)

    assert mail_server.accepted == []
    assert await states(database) == {"pending": 1}
    assert not await is_claimed(database)  # Another process may send it at once.
    assert await attempts(database) == 0


async def test_stopping_postman_keeps_the_claim_on_an_email_that_may_have_been_accepted(
    worker_settings, mail_link, database, intended
):
    mail_link.hold_before(b"Message-ID:")
    settings = settings_with(worker_settings, smtp_url=mail_link.url, shutdown_seconds=0.4)

    async with open_postman(settings) as postman, running(postman.run):
        await eventually(mail_link.marker_reached.is_set)

    assert await is_claimed(database)
    assert await database.fetchval("SELECT request_id FROM email") == intended.id


async def test_postman_keeps_to_the_rate(worker_settings, pool, database):
    await record_emails(database, pool, 10)

    async with open_postman(settings_with(worker_settings, email_rate=4.0)) as postman:
        began = time.monotonic()
        async with running(postman.run):
            await eventually(lambda: all_are(database, "sent"))

    assert time.monotonic() - began >= (10 - 1) / 4
