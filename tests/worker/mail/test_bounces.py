"""Bounces: reports of mail servers in a real mailbox, Dovecot's, and what becomes of the e-mails."""

import asyncio
import json
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest
from structlog.testing import capture_logs

from deploy.local.machine.ports import free_port
from service.calculation_requests import email_changes, erasing
from service.calculation_requests.changing import change_all
from service.calculation_requests.email_changes import EmailId
from service.calculation_requests.model import CalculationRequest
from service.postgres.pool import Connection
from tests.harness import bounces, dovecot, metrics, stored
from tests.harness.dovecot import Dovecot, access_token
from tests.harness.fixed_answers import answering, http_answer
from tests.harness.in_process import running
from tests.harness.waiting import eventually
from tests.worker.conftest import settings_with
from tests.worker.mail.conftest import announced, open_reader, record_emails
from worker.commands.emails import Choice, read
from worker.mail import tokens
from worker.mail.mailbox import MailboxUnavailable, in_thread, opened
from worker.settings import EmailSettings

UNKNOWN, POLICY, DELAY, AWAY = (
    "postfix_unknown_user",
    "postfix_refused_content",
    "postfix_delay",
    "out_of_office",
)
HANDLED = {"\\Deleted", "\\Flagged"}
FIND_EMAILS = "SELECT request_id, state, reason, smtp_code, server_reply, attempts FROM email"


@pytest.fixture
def settings(worker_settings, mailbox):
    return settings_with(worker_settings, bounces_url=mailbox.url, bounces_poll_seconds=1.0)


@pytest.fixture
async def reader(settings):
    async with open_reader(settings) as opened:
        yield opened


async def send_emails(database: Connection, number: int) -> list[CalculationRequest]:
    """Return requests whose e-mails were sent."""
    requests = await record_emails(database, number)
    await database.execute("UPDATE email SET state = 'sent', attempts = 1")
    await database.execute("DELETE FROM outbox")
    return requests


def report(request: CalculationRequest, name: str = UNKNOWN) -> bytes:
    email = EmailId(request.id, 1, "invitation")
    return bounces.message(name, token=tokens.make(email, stored.KEYS, key_id=request.secret_key_id))


def flags(mailbox: Dovecot) -> list[set[str]]:
    return [message.flags for message in mailbox.messages]


async def failures(database: Connection) -> list[dict[str, Any]]:
    """Return the data of request.email_failed in the outbox."""
    return [json.loads(data) for kind, _, data in await announced(database) if kind == "request.email_failed"]


async def test_bounce_fails_the_sent_email_and_announces_it(reader, database, mailbox):
    unknown, refused, delayed, answered = await send_emails(database, 4)
    for request, name in ((unknown, UNKNOWN), (refused, POLICY), (delayed, DELAY), (answered, AWAY)):
        mailbox.put(report(request, name))

    with metrics.rises("bounces_total", fault="sender"), metrics.rises("bounces_total", fault="recipient"):
        await reader.look()
        await reader.look()  # It removes what the first has handled.

    rows = {row["request_id"]: tuple(row)[1:] for row in await database.fetch(FIND_EMAILS)}
    assert rows[unknown.id][:3] == ("failed", "bounced", 550)
    assert rows[unknown.id][3].startswith("550 5.1.1 <[address]>")
    assert rows[refused.id] == ("failed", "bounced", 550, "550 5.7.1 Message rejected as spam", 1)
    assert rows[delayed.id] == rows[answered.id] == ("sent", None, None, None, 1)
    events = {event["uuid"]: event for event in await failures(database)}
    assert events.keys() == {unknown.uuid, refused.uuid}
    expected = {"email": 1, "kind": "invitation", "reason": "bounced", "smtp_code": 550}
    assert {field: events[unknown.uuid][field] for field in expected} == expected
    (to_resend,) = await read(database, Choice(reply="5.7."), state="failed", only_last=True)
    assert (to_resend["uuid"], to_resend["reason"]) == (refused.id, "bounced")
    (kept,) = mailbox.messages  # the customer's answer
    assert ("\\Flagged" in kept.flags, "\\Seen" in kept.flags) == (True, False)


async def test_report_is_recorded_once_however_often_and_by_whomever_it_is_read(settings, database, mailbox):
    requests = await send_emails(database, 30)
    for request in [*requests, *requests[:5]]:
        mailbox.put(report(request))

    async with open_reader(settings) as one, open_reader(settings) as other:
        ends = await asyncio.gather(one.look(), other.look(), return_exceptions=True)
        await one.look()
        await one.look()

    assert Counter(event["uuid"] for event in await failures(database)) == Counter(
        request.uuid for request in requests
    )
    assert mailbox.messages == []
    assert all(end is None or isinstance(end, MailboxUnavailable) for end in ends)


async def test_report_of_a_pending_email_waits_for_its_end(reader, database, mailbox):
    (request,) = await record_emails(database, 1)
    with mailbox.connected() as connection:  # by whose clock it came long ago
        connection.append("INBOX", "", datetime.now(UTC) - timedelta(days=1), report(request))

    await reader.look()
    waiting = flags(mailbox)
    await database.execute("UPDATE email SET state = 'sent'")
    await reader.look()

    assert (waiting, flags(mailbox)) == ([set()], [HANDLED])
    assert [event["uuid"] for event in await failures(database)] == [request.uuid]


async def test_late_report_fails_the_email_that_it_names_and_no_other(reader, database, mailbox):
    corrected, withdrawn = await send_emails(database, 2)
    async with database.transaction(), change_all(database, [corrected.id, withdrawn.id]) as requests:
        await email_changes.correct(database, requests[corrected.id], key_id="1", address="a@example.com")
        requests[withdrawn.id].withdrawn_at = datetime.now(UTC)
    for request in (corrected, withdrawn):
        mailbox.put(report(request))

    await reader.look()
    await database.execute("UPDATE email SET state = 'sent' WHERE state = 'pending'")
    mailbox.put(report(corrected))
    await reader.look()

    rows = await database.fetch("SELECT request_id, number, state FROM email ORDER BY number, created_at")
    assert {tuple(row) for row in rows} == {
        (corrected.id, 1, "failed"),
        (corrected.id, 2, "sent"),
        (withdrawn.id, 1, "failed"),
    }
    assert [event["email"] for event in await failures(database)] == [1, 1]


async def test_locked_email_delays_no_other_and_is_recorded_later(
    reader, database, other_connection, mailbox
):
    locked, email_locked, free = await send_emails(database, 3)
    for request in (locked, email_locked, free):
        mailbox.put(report(request))
    async with other_connection.transaction():
        await other_connection.execute("SELECT FROM calculation_request WHERE id = $1 FOR UPDATE", locked.id)
        await other_connection.execute("SELECT FROM email WHERE request_id = $1 FOR UPDATE", email_locked.id)

        await reader.look()

        assert [event["uuid"] for event in await failures(database)] == [free.uuid]
    assert flags(mailbox) == [set(), set(), HANDLED]
    await reader.look()
    assert len(await failures(database)) == 3


async def test_reports_of_erased_requests_and_forged_ones_are_flagged(reader, database, mailbox):
    erased, other = await send_emails(database, 2)
    async with database.transaction():
        await erasing.erase(database, [erased.id])
    mailbox.put(report(erased))
    mailbox.put(bounces.message(UNKNOWN, token=f"{other.uuid}.invitation.1.{'A' * 22}"))
    mailbox.put(b"no message at all")

    await reader.look()

    assert flags(mailbox) == [{"\\Flagged"}] * 3
    assert await failures(database) == []


async def test_messages_that_people_have_deleted_or_flagged_are_left_alone(reader, database, mailbox):
    (request,) = await send_emails(database, 1)
    for flag in ("\\Deleted", "\\Flagged", "\\Seen"):
        with mailbox.connected() as connection:
            connection.append("INBOX", flag, None, report(request))

    await reader.look()

    assert flags(mailbox) == [{"\\Deleted"}, {"\\Flagged"}, HANDLED | {"\\Seen"}]


async def test_many_new_messages_are_read_in_several_looks(reader, database, mailbox):
    (request,) = await send_emails(database, 1)
    mailbox.fill(20_001, b"Subject: old\r\n\r\n", flags="F")
    mailbox.fill(203, b"Subject: new\r\n\r\n")
    mailbox.put(report(request))

    await reader.look()
    await reader.look()

    assert len(await failures(database)) == 1


async def test_outage_of_the_imap_server_is_logged_and_ends_by_itself(settings, database, mailbox):
    (request,) = await send_emails(database, 1)
    mailbox.put(report(request))
    mailbox.kill()

    async with open_reader(settings) as reader:
        with capture_logs() as logs:
            async with running(reader.run):
                await eventually(lambda: metrics.value("bounces_look_age_seconds") > 2)
                mailbox.restart()
                await eventually(lambda: failures(database))
                await eventually(lambda: metrics.value("bounces_look_age_seconds") < 1)

    assert logs[0] == {
        "event": "bounces_not_read",
        "log_level": "warning",
        "reason": "connection refused",
    }


async def explain(settings: EmailSettings, **changes: Any) -> str:
    """Return why the mailbox cannot be opened with *changes* to the settings."""
    try:
        with ExitStack() as stack:
            await in_thread(partial(stack.enter_context, opened(settings_with(settings, **changes))))
            return ""
    except MailboxUnavailable as error:
        return str(error)


async def test_folder_may_have_any_name(settings, mailbox):
    with mailbox.connected() as connection:
        assert connection.create('"Unzustellbar f&APw-r K &- L"')[0] == "OK"

    url = mailbox.url.replace("INBOX", quote("Unzustellbar für K & L"))
    assert await explain(settings, bounces_url=url) == ""


async def test_fault_of_the_mailbox_is_explained_without_the_password(settings, mailbox):
    injected = quote(f'{dovecot.LOGIN} "{dovecot.PASSWORD}"\r\nx', safe="")  # a whole command, unless encoded
    faults = {
        mailbox.tls_url: "",
        mailbox.tls_url.replace("127.0.0.1", "localhost"): "its certificate is not accepted",
        mailbox.url.replace("%40service", "%40other"): "rejects the login",
        mailbox.url.replace("word", "w%C3%B6rd"): "rejects the login",
        f"imap://{injected}:x@127.0.0.1:{mailbox.port}": "rejects the login",
        mailbox.url.replace("INBOX", "Bounces"): "does the folder exist",
        mailbox.url.replace("/INBOX", ""): "",
        mailbox.url.replace(":" + str(mailbox.port), f":{free_port()}"): "connection refused",
        mailbox.url.replace("imap:", "imaps:"): "TLS fails",
        mailbox.url.replace("127.0.0.1", "nowhere.invalid"): "unknown host",
    }

    for url, expected in faults.items():
        found = await explain(settings, bounces_url=url)
        assert expected in found if expected else not found, url
        assert "word" not in found


async def test_server_without_uidplus_is_refused_and_nothing_removed(worker_settings, authority):
    with dovecot.running(authority, imap_capability="IMAP4rev1 LITERAL+") as mailbox:
        mailbox.put(bounces.message(UNKNOWN))

        assert "lacks UIDPLUS" in await explain(worker_settings, bounces_url=mailbox.url)
        assert flags(mailbox) == [set()]


async def test_mailbox_is_opened_with_an_access_token(worker_settings, authority):
    form = "client_id=us&client_secret=secret&scope=all"
    expected_form = f"\r\n\r\ngrant_type=client_credentials&{form}".encode()
    answers = {
        "200 OK": (json.dumps({"access_token": access_token(), "token_type": "Bearer"}), ""),
        "401 Unauthorized": ("{}", "BOUNCES_TOKEN_URL gives no access token: it answers 401"),
        "no status": ("", "BOUNCES_TOKEN_URL gives no access token"),
        "200 Fine": ("no JSON", "BOUNCES_TOKEN_URL gives no access token"),
        "201 Created": (json.dumps({"access_token": "wrong"}), "rejects the login"),
    }
    context = authority.server_context(address="localhost")
    with dovecot.running(authority) as mailbox:
        settings = settings_with(worker_settings, bounces_url=mailbox.url)
        for status, (body, expected) in answers.items():
            answer = http_answer(status, body.encode())
            async with answering(answer, context, until=expected_form) as port:
                found = await explain(settings, bounces_token_url=f"https://localhost:{port}/token?{form}")
                assert expected in found if expected else not found, (found, mailbox.log)
