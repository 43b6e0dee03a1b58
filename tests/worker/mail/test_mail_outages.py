"""Outages of the mail server and of Postgres lose no e-mail, charge no attempt and send none twice."""

import time

import pytest
from structlog.testing import capture_logs

from tests.harness.in_process import running
from tests.harness.mail_server import ScriptedMailServer, Session
from tests.harness.waiting import eventually
from tests.worker.conftest import open_postman, settings_with
from tests.worker.mail.conftest import all_are, announced, attempts, record_emails

RELEASED = """
    SELECT claimed_by IS NULL AND attempts = 0 AND created_at < next_attempt_at
           AND server_reply = 'no connection: SMTPConnectError (ConnectionRefusedError)'
      FROM email
"""


async def test_refused_connection_to_the_mail_server_counts_no_attempt(
    postman, mail_server, database, intended
):
    await mail_server.stop()

    async with running(postman.run):
        await eventually(lambda: database.fetchval(RELEASED))
        await mail_server.start()
        await eventually(lambda: all_are(database, "sent"))

    assert await attempts(database) == 1
    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]


A_SECOND = 5
IN_HAND = 4
EMAILS = 15


class LimitingMailServer(ScriptedMailServer):
    """Accepts so many e-mails in each second of the clock, and throttles the others."""

    accepted = 0
    _second = 0
    _accepted_in_it = 0

    async def reply_to(self, session: Session, command: str, sent: bytes) -> bytes | None:
        """Return the reply to a command, or to the content."""
        if command != "content":
            return await super().reply_to(session, command, sent)
        if self._second != (now := int(time.monotonic())):
            self._second, self._accepted_in_it = now, 0
        if self._accepted_in_it == A_SECOND:
            return b"454 Throttling failure: Maximum sending rate exceeded"
        self._accepted_in_it += 1
        self.accepted += 1
        return b"250 OK"


async def test_throttled_postman_makes_few_attempts_in_vain_and_counts_none(worker_settings, pool, database):
    await record_emails(database, pool, EMAILS)

    async with LimitingMailServer() as server:
        settings = settings_with(worker_settings, smtp_url=server.url, email_concurrency=IN_HAND // 2)
        began = time.monotonic()
        async with open_postman(settings) as postman, running(postman.run):
            await eventually(lambda: all_are(database, "sent"))
        seconds = time.monotonic() - began

    assert server.accepted == EMAILS
    assert 0 < len(server.contents) - EMAILS <= IN_HAND * (seconds + 1)
    assert await attempts(database) == EMAILS


@pytest.mark.parametrize("refusal", [b"452 4.3.1 Insufficient storage", b"550 Sender refused"])
async def test_refused_sender_is_shown_counts_no_attempt_and_leaves_no_connection_open(
    worker_settings, rude_server, pool, database, refusal
):
    await record_emails(database, pool, 3)
    usual, rude_server.replies["MAIL"] = rude_server.replies["MAIL"], refusal
    settings = settings_with(worker_settings, smtp_url=rude_server.url, email_concurrency=2)

    async with open_postman(settings) as postman, running(postman.run):
        await eventually(lambda: rude_server.connections >= 12)
        open_connections = rude_server.open_connections
        shown = await database.fetch("SELECT DISTINCT attempts, server_reply FROM email")
        rude_server.replies["MAIL"] = usual
        await eventually(lambda: all_are(database, "sent"))

    assert open_connections <= 4
    assert shown == [(0, refusal.decode())]
    assert len(rude_server.contents) == await attempts(database) == 3


@pytest.mark.usefixtures("intended")
async def test_outage_is_logged_with_the_code_and_without_the_words_of_the_mail_server(
    worker_settings, rude_server
):
    rude_server.replies["greeting"] = b"554 No mail from calculations@service.example.com"

    with capture_logs() as logs:
        async with (
            open_postman(settings_with(worker_settings, smtp_url=rude_server.url)) as postman,
            running(postman.run),
        ):
            await eventually(lambda: "mail_paused" in {log["event"] for log in logs})

    paused = next(log for log in logs if log["event"] == "mail_paused")
    assert (paused["error"], paused["smtp_code"]) == ("MailServerUnavailable (SMTPConnectResponseError)", 554)
    assert {log["log_level"] for log in logs if log["event"] == "email_handled"} == {"debug"}
    assert "service.example.com" not in str(logs)


async def test_outage_of_postgres_after_the_acceptance_does_not_send_the_email_again(
    worker_settings, mail_server, postgres_link, mail_link, database, intended
):
    settings = settings_with(worker_settings, database_url=postgres_link.url, smtp_url=mail_link.url)
    mail_link.hold_before(b"Message-ID:")

    with capture_logs() as logs:
        async with open_postman(settings) as postman, running(postman.run):
            await eventually(mail_link.marker_reached.is_set)
            await postgres_link.refuse()
            mail_link.resume()
            await eventually(lambda: mail_server.accepted)
            await eventually(lambda: postgres_link.refused >= 3)
            postgres_link.admit()
            await eventually(lambda: all_are(database, "sent"))

    assert {log["event"] for log in logs} == {
        "emails_not_claimed",
        "batch_waits_for_postgres",
        "email_handled",
    }
    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]
    assert [event_type for event_type, _, _ in await announced(database)] == ["request.email_sent"]
