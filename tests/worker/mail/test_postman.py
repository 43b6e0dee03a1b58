"""The postman sends the due e-mails of the ledger, and records and announces the outcome."""

import asyncio
import time
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from service.calculation_requests.email_changes import EmailId
from service.outbox.events import RequestEmailFailed, RequestEmailSent
from tests.harness import stored
from tests.harness.in_process import running
from tests.harness.metrics import rises
from tests.harness.waiting import eventually
from tests.worker.conftest import postman_held_before, running_postman, store_old
from tests.worker.mail.conftest import all_are, announced, attempts, is_claimed, record_emails, states
from tests.worker.steps import intend_several
from worker.mail.tokens import find

REFUSED = {"reason": "refused", "smtp_code": 550}


async def test_email_that_is_sent_again_is_equal_except_for_its_date(
    worker_settings, mail_server, database, intended
):
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
        async with running(postman.run):
            await eventually(lambda: all_are(database, state))
        assert await postman.claim_due() == 0

    email = await database.fetchrow("SELECT server_reply, attempts, claimed_by FROM email")
    assert email == (reply.removeprefix("250 "), 1, None)
    ended = intended.event(event, sequence=2, email=1, kind="invitation", **failure)
    ((event_type, sequence, data),) = await announced(database)
    assert (event_type, sequence) == (ended.type, 2)
    assert msgspec.json.decode(data) == msgspec.to_builtins(ended)
    assert await database.fetchval("SELECT sequence FROM calculation_request") == 2
    handled = {"event": "email_handled", "log_level": "info", "attempts": 1, "outcome": state}
    [line] = [log for log in logs if log["event"] == "email_handled"]
    assert line == handled | {"reason": None, "smtp_code": 0} | failure


async def test_delay_of_a_requests_first_email_is_measured_from_the_create(postman, database):
    request = await store_old(database, datetime.now(UTC) - timedelta(minutes=10))
    await intend_several(database, request, 2)

    with (
        rises("email_delivery_seconds_bucket", le="300.0"),
        rises("email_delivery_seconds_bucket", le="1800.0", by=2),
    ):
        async with running(postman.run):
            await eventually(lambda: all_are(database, "sent"))


@pytest.mark.parametrize("reply", [b"250 OK \xe9", b"250 OK \x00 done"], ids=["Latin-1", "NUL"])
async def test_acceptance_in_any_encoding_is_final(worker_settings, rude_server, database, intended, reply):
    rude_server.replies["content"] = reply

    async with running_postman(worker_settings, smtp_url=rude_server.url):
        await eventually(lambda: all_are(database, "sent"))

    assert len(rude_server.contents) == 1
    assert intended.uuid.encode() in rude_server.contents[0]


async def test_postman_sends_no_more_emails_at_once_than_allowed(worker_settings, mail_link, database):
    # A reply that is late on a busy machine must not cost a connection.
    limits = {"email_concurrency": 2, "smtp_timeout_seconds": 60.0}
    mail_link.hold_before(b"Message-ID:")
    await record_emails(database, 5)
    claimed = "SELECT count(*) = 4 FROM email WHERE claimed_by IS NOT NULL"

    async with running_postman(worker_settings, smtp_url=mail_link.url, **limits) as postman:
        await eventually(lambda: database.fetchval(claimed))
        await eventually(lambda: mail_link.connections == 2)
        claimed_more = await postman.claim_due()
        mail_link.resume()
        await eventually(lambda: all_are(database, "sent"))

    assert (claimed_more, mail_link.connections) == (0, 2)


async def test_stopping_postman_waits_long_for_the_reply_to_a_content_that_was_sent(
    worker_settings, mail_server, mail_link, database, intended
):
    async with postman_held_before(b"Message-ID:", mail_link, worker_settings, shutdown_seconds=20.0):
        asyncio.get_running_loop().call_later(2.0, mail_link.resume)

    assert await states(database) == {"sent": 1}
    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]


@pytest.mark.usefixtures("intended")
async def test_stopping_postman_sends_no_further_content(worker_settings, mail_server, mail_link, database):
    async with postman_held_before(b"RCPT", mail_link, worker_settings):
        asyncio.get_running_loop().call_later(0.05, mail_link.resume)

    assert mail_server.accepted == []
    assert await states(database) == {"pending": 1}
    assert not await is_claimed(database)  # Another process may send it at once.
    assert await attempts(database) == 0


async def test_stopping_postman_keeps_claims_on_content_sent(worker_settings, mail_link, database, intended):
    async with postman_held_before(b"Message-ID:", mail_link, worker_settings, shutdown_seconds=0.4):
        pass

    assert await is_claimed(database)
    assert await database.fetchval("SELECT request_id FROM email") == intended.id


async def test_postman_keeps_to_the_rate(worker_settings, database):
    await record_emails(database, 10)

    began = time.monotonic()
    async with running_postman(worker_settings, email_rate=4.0):
        await eventually(lambda: all_are(database, "sent"))

    assert time.monotonic() - began >= (10 - 1) / 4
