"""Bounces: reports in a real mailbox, Dovecot's, and what becomes of the e-mails; rude mailboxes."""

import asyncio
import json
from collections.abc import Awaitable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest

from deploy.local.machine.ports import free_port
from service.calculation_requests import email_changes, erasing
from service.calculation_requests.changing import change_all
from service.calculation_requests.email_changes import EmailId
from service.calculation_requests.model import CalculationRequest
from service.postgres.pool import Connection
from tests.harness import bounces, databases, metrics, stored
from tests.harness.dovecot import LOGIN, PASSWORD, Dovecot, access_token
from tests.harness.in_process import running
from tests.harness.loopback_server import AnsweringServer, LoopbackServer, http_answer
from tests.harness.servers import running_daemon
from tests.harness.waiting import eventually
from tests.worker.conftest import settings_with
from tests.worker.steps import announced, record_emails
from worker.commands.emails import Choice, read
from worker.mail import bounces as product_bounces
from worker.mail import mailbox as product_mailbox
from worker.mail import tokens
from worker.mail.mailbox import MailboxUnavailable, in_thread, opened
from worker.settings import EmailSettings

UNKNOWN = "postfix_unknown_user"
HANDLED = {"\\Deleted", "\\Flagged"}


@pytest.fixture
def settings(worker_settings, mailbox):
    return settings_with(worker_settings, bounces_url=mailbox.url, bounces_poll_seconds=1.0)


@pytest.fixture
def look(settings, pool, relay_waker):
    return partial(product_bounces.look, settings, pool, relay_waker)


async def send_emails(database: Connection, number: int) -> list[CalculationRequest]:
    """Return requests whose e-mails were sent."""
    requests = await record_emails(database, number)
    await database.execute("UPDATE email SET state = 'sent', attempts = 1")
    return requests


def report(request: CalculationRequest, name: str = UNKNOWN) -> bytes:
    email = EmailId(request.id, 1, "invitation")
    return bounces.message(name, token=tokens.make(email, stored.KEYS, key_id=request.secret_key_id))


def flags(mailbox: Dovecot) -> list[set[str]]:
    return [message.flags for message in mailbox.messages]


async def failures(database: Connection) -> list[dict[str, Any]]:
    return [data for kind, data in await announced(database) if kind == "request.email_failed"]


async def test_bounce_fails_the_sent_email_and_announces_it(look, database, mailbox):
    requests = await send_emails(database, 4)
    names = (UNKNOWN, "postfix_refused_content", "postfix_delay", "out_of_office")
    for request, name in zip(requests, names, strict=True):
        mailbox.put(report(request, name))

    with metrics.rises("bounces_total", fault="sender"), metrics.rises("bounces_total", fault="recipient"):
        await look()
        await look()  # It removes what the first has handled.

    found = await database.fetch(
        "SELECT state, reason, smtp_code, server_reply, attempts FROM email ORDER BY created_at"
    )
    *bounced, words, _ = found[0]
    assert (bounced, words[:21]) == (["failed", "bounced", 550], "550 5.1.1 <[address]>")
    assert found[1] == ("failed", "bounced", 550, "550 5.7.1 Message rejected as spam", 1)
    assert found[2:] == [("sent", None, None, None, 1)] * 2
    events = {event.pop("uuid"): event for event in await failures(database)}
    assert events.keys() == {request.uuid for request in requests[:2]}
    expected = {"email": 1, "kind": "invitation", "reason": "bounced", "smtp_code": 550}
    assert expected.items() <= events[requests[0].uuid].items()
    (found_by_reply,) = await read(database, Choice(reply="5.7."), state="failed", only_last=True)
    assert (found_by_reply["uuid"], found_by_reply["reason"]) == (requests[1].id, "bounced")
    (kept,) = mailbox.messages  # the customer's answer
    assert ("\\Flagged" in kept.flags, "\\Seen" in kept.flags) == (True, False)


async def test_report_is_recorded_once_however_often_and_by_whomever_it_is_read(look, database, mailbox):
    requests = await send_emails(database, 30)
    for request in [*requests, *requests[:5]]:
        mailbox.put(report(request))

    ends = await asyncio.gather(look(), look(), return_exceptions=True)
    await look()
    await look()

    recorded = sorted(event["uuid"] for event in await failures(database))
    assert (recorded, mailbox.messages) == (sorted(request.uuid for request in requests), [])
    assert all(end is None or isinstance(end, MailboxUnavailable) for end in ends)


async def test_late_report_fails_the_email_that_it_names_and_no_other(look, database, mailbox):
    corrected, withdrawn = await send_emails(database, 2)
    async with database.transaction(), change_all(database, [corrected.id, withdrawn.id]) as requests:
        await email_changes.correct(database, requests[corrected.id], key_id="1", address="a@example.com")
        requests[withdrawn.id].withdrawn_at = datetime.now(UTC)
    for request in (corrected, withdrawn):
        mailbox.put(report(request))

    await look()
    await database.execute("UPDATE email SET state = 'sent' WHERE state = 'pending'")
    mailbox.put(report(corrected))
    await look()

    rows = await database.fetch("SELECT request_id, number FROM email WHERE state = 'failed'")
    assert {*rows} == {(corrected.id, 1), (withdrawn.id, 1)}
    assert [event["email"] for event in await failures(database)] == [1, 1]


async def test_report_of_a_pending_or_locked_email_waits_and_delays_no_other(
    look, database, database_url, mailbox
):
    locked, email_locked, free = requests = await send_emails(database, 3)
    [pending] = await record_emails(database, 1)
    with mailbox.connected() as connection:  # by whose clock it came long ago
        connection.append("INBOX", "", datetime.now(UTC) - timedelta(days=1), report(pending))
    for request in requests:
        mailbox.put(report(request))
    async with databases.connected(database_url) as holder, holder.transaction():
        await holder.execute("SELECT FROM calculation_request WHERE id = $1 FOR UPDATE", locked.id)
        await holder.execute("SELECT FROM email WHERE request_id = $1 FOR UPDATE", email_locked.id)
        await look()

    assert [event["uuid"] for event in await failures(database)] == [free.uuid]
    assert flags(mailbox) == [set(), set(), set(), HANDLED]
    await database.execute("UPDATE email SET state = 'sent' WHERE state = 'pending'")
    await look()
    reported = {each.uuid for each in (pending, *requests)}
    assert {event["uuid"] for event in await failures(database)} == reported


async def test_forged_reports_and_those_of_erased_requests_are_left_to_people(look, database, mailbox):
    erased, other = await send_emails(database, 2)
    async with database.transaction():
        await erasing.erase(database, [erased.id])
    mailbox.put(report(erased))
    mailbox.put(bounces.message(UNKNOWN, token=f"{other.uuid}.invitation.1.{'A' * 22}"))
    mailbox.put(b"no message at all")
    with mailbox.connected() as connection:
        for flag in ("\\Deleted", "\\Flagged"):
            connection.append("INBOX", flag, None, report(other))

    await look()
    none = await failures(database)
    with mailbox.connected() as connection:
        connection.append("INBOX", "\\Seen", None, report(other))
    await look()

    assert (none, len(await failures(database))) == ([], 1)
    assert flags(mailbox) == [{"\\Flagged"}] * 3 + [{"\\Deleted"}, {"\\Flagged"}, HANDLED | {"\\Seen"}]


async def test_many_new_messages_are_read_in_several_looks(look, database, mailbox):
    (request,) = await send_emails(database, 1)
    mailbox.fill(20_001, b"Subject: old\r\n\r\n", flags="F")
    mailbox.fill(203, b"Subject: new\r\n\r\n")
    mailbox.put(report(request))

    await look()
    await look()

    assert len(await failures(database)) == 1


async def test_outage_of_the_imap_server_is_logged_and_ends_by_itself(
    settings, pool, relay_waker, database, mailbox, logs
):
    (request,) = await send_emails(database, 1)
    mailbox.put(report(request))
    mailbox.kill()

    async with running(partial(product_bounces.run, settings, pool, relay_waker)):
        await eventually(lambda: logs)  # Until then, the age is that of an earlier test.
        await eventually(lambda: metrics.value("bounces_look_age_seconds") > 2)
        mailbox.restart()
        await eventually(lambda: failures(database))
        await eventually(lambda: metrics.value("bounces_look_age_seconds") < 1)

    assert (logs[0]["event"], logs[0]["reason"]) == ("bounces_not_read", "connection refused")


async def explain(settings: EmailSettings, **changes: Any) -> str:
    """Return why the mailbox cannot be opened with *changes* to the settings."""
    try:
        with ExitStack() as stack:
            await in_thread(partial(stack.enter_context, opened(settings_with(settings, **changes))))
            return ""
    except MailboxUnavailable as error:
        return str(error)


async def test_folder_has_any_name_and_a_fault_is_explained_without_the_password(settings, mailbox):
    with mailbox.connected() as connection:
        assert connection.create('"Unzustellbar f&APw-r K &- L"')[0] == "OK"
    injected = quote(f'{LOGIN} "{PASSWORD}"\r\nx', safe="")  # a whole command, unless encoded
    faults = {
        mailbox.tls_url: "",
        mailbox.tls_url.replace("127.0.0.1", "localhost"): "its certificate is not accepted",
        mailbox.url.replace("INBOX", "Bounces"): "does the folder exist",
        mailbox.url.replace("/INBOX", ""): "",
        mailbox.url.replace("INBOX", quote("Unzustellbar für K & L")): "",
        mailbox.url.replace(":" + str(mailbox.port), f":{free_port()}"): "connection refused",
        mailbox.url.replace("imap:", "imaps:"): "TLS fails",
        mailbox.url.replace("127.0.0.1", "nowhere.invalid"): "unknown host",
        # The last ones, because Dovecot answers an address later after each refused login.
        mailbox.url.replace("word", "w%C3%B6rd"): "rejects the login",
        f"imap://{injected}:x@127.0.0.1:{mailbox.port}": "rejects the login",
    }

    for url, expected in faults.items():
        found = await explain(settings, bounces_url=url)
        assert expected in found if expected else not found, url
        assert "word" not in found


async def test_server_without_uidplus_is_refused_and_nothing_removed(worker_settings, authority):
    with running_daemon(Dovecot, authority, imap_capability="IMAP4rev1 LITERAL+") as mailbox:
        mailbox.put(bounces.message(UNKNOWN))

        assert "lacks UIDPLUS" in await explain(worker_settings, bounces_url=mailbox.url)
        assert flags(mailbox) == [set()]


async def test_mailbox_is_opened_with_an_access_token(settings, authority):
    form, no_token = "client_id=us&client_secret=secret", "BOUNCES_TOKEN_URL gives no access token"
    sent_form = f"\r\n\r\ngrant_type=client_credentials&{form}".encode()
    answers = {
        "200 OK": (json.dumps({"access_token": access_token(), "token_type": "Bearer"}), ""),
        "401 Unauthorized": ("{}", f"{no_token}: it answers 401"),
        "no status": ("", no_token),
        "200 Fine": ("no JSON", no_token),
        "201 Created": (json.dumps({"access_token": "wrong"}), "rejects the login"),
    }
    context = authority.server_context(address="localhost")
    for status, (body, expected) in answers.items():
        async with AnsweringServer(http_answer(status, body.encode()), context, sent_form) as server:
            url = f"https://localhost:{server.port}/token?{form}"
            found = await explain(settings, bounces_token_url=url)
        assert expected in found if expected else not found, (status, found)


_ANSWERS = {
    b"greeting": b"* OK ready\r\n",
    b"CAPABILITY": b"* CAPABILITY IMAP4rev1 UIDPLUS AUTH=PLAIN\r\n",
    b"SELECT": b"* 1 EXISTS\r\n",
    b"SEARCH": b"* SEARCH 1 2\r\n",
    b"FETCH": b'* 1 FETCH (UID 1 INTERNALDATE "28-Nov-2026 09:00:00 +0000" BODY[]<0> {5}\r\nhello)\r\n',
}


class RudeMailbox(LoopbackServer):
    """An IMAP server that cannot read its second message, and sends *rude* without end at *step*."""

    def __init__(self, step: bytes = b"nothing", rude: bytes = b"", pause_seconds: float = 0.0) -> None:
        super().__init__()
        self._step, self._rude, self._pause_seconds = step, rude, pause_seconds
        self.commands: list[bytes] = []

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one client."""
        line = b"* greeting"
        while line:
            self.commands.append(line)
            while self._step in line:
                writer.write(self._rude)
                await writer.drain()
                await asyncio.sleep(self._pause_seconds)
            if b"AUTHENTICATE" in line:
                writer.write(b"+ \r\n")
                await reader.readline()
            tag, *_ = line.split()
            end = b" NO It is damaged.\r\n" if b"FETCH 2" in line else b" OK done\r\n"
            writer.write(next((text for command, text in _ANSWERS.items() if command in line), b""))
            writer.write(tag + end if tag != b"*" else b"")
            line = await reader.readline()


@pytest.fixture
def look_at(worker_settings, pool, relay_waker):
    def look(rude: RudeMailbox) -> Awaitable[None]:
        settings = settings_with(worker_settings, bounces_url=f"imap://user:word@127.0.0.1:{rude.port}")
        return product_bounces.look(settings, pool, relay_waker)

    return look


async def test_message_that_cannot_be_read_delays_no_other(look_at):
    async with RudeMailbox() as rude:
        await look_at(rude)

    assert rude.commands[-1].endswith(b"UID STORE 1 +FLAGS.SILENT (\\Flagged)\r\n")


@pytest.mark.parametrize(
    ("step", "rude", "pause_seconds", "reason"),
    [
        # Which, depends on whether the last byte comes after we have closed the connection.
        (b"greeting", b"x", 0.2, "the connection was lost|it closed the connection"),
        (b"FETCH", b"x", 0.2, "the connection was lost|it closed the connection"),
        # As imaplib's errors are explained.
        (b"SEARCH", b"* 1 FETCH (FLAGS (" + b"x" * 100_000 + b"))\r\n", 0.0, "sends too much"),
        (b"FETCH", b"* 1 FETCH (UID 1 BODY[]<0> {4000000000}\r\n" + bytes(100_000), 0.0, "sends too much"),
    ],
    ids=["greeting drips", "message drips", "no end", "four gigabytes"],
)
async def test_look_ends_in_time(*, monkeypatch, look_at, step, rude, pause_seconds, reason):
    if pause_seconds:
        monkeypatch.setattr(product_mailbox, "_LONGEST_LOOK_SECONDS", 1.0)

    async with RudeMailbox(step, rude, pause_seconds) as server, asyncio.timeout(60):
        with pytest.raises(MailboxUnavailable, match=reason):
            await look_at(server)
