"""Outages of the mail server and of Postgres lose no e-mail, charge no attempt and send none twice."""

import time

import pytest
from structlog.testing import capture_logs

from tests.harness.in_process import running
from tests.harness.waiting import eventually
from tests.worker.conftest import open_postman, settings_with
from tests.worker.mail.conftest import all_are, announced, attempts, record_emails

RELEASED = """
    SELECT claimed_by IS NULL AND attempts = 0 AND created_at < next_attempt_at
           AND server_reply = 'no connection: SMTPConnectError (ConnectionRefusedError)'
      FROM email
"""


async def test_unreachable_mail_server_counts_no_attempt(postman, mail_server, database, intended):
    await mail_server.stop()

    async with running(postman.run):
        await eventually(lambda: database.fetchval(RELEASED))
        await mail_server.start()
        await eventually(lambda: all_are(database, "sent"))

    assert await attempts(database) == 1
    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]


@pytest.mark.parametrize(
    ("command", "refusal"),
    [
        ("greeting", "554 No mail from calculations@service.example.com"),
        ("MAIL", "452 4.3.1 Insufficient storage"),
        ("MAIL", "550 Sender refused"),
        ("content", "454 Throttling failure: Maximum sending rate exceeded"),
    ],
)
async def test_mail_server_that_takes_no_emails_is_tried_each_second_and_no_attempt_is_counted(
    worker_settings, rude_server, database, command, refusal
):
    await record_emails(database, 3)
    usual, rude_server.replies[command] = rude_server.replies[command], refusal.encode()
    settings = settings_with(worker_settings, smtp_url=rude_server.url, email_concurrency=2)
    began = time.monotonic()

    with capture_logs() as logs:
        async with open_postman(settings) as postman, running(postman.run):
            # A refused sender is tried again at once over a second connection.
            await eventually(lambda: max(rude_server.connections, len(rude_server.contents)) >= 12)
            seconds = time.monotonic() - began
            open_connections = rude_server.open_connections
            shown = await database.fetch("SELECT DISTINCT attempts, server_reply FROM email")
            rude_server.replies[command] = usual
            await eventually(lambda: all_are(database, "sent"))

    assert seconds >= 1
    assert open_connections <= 4
    assert shown == [(0, refusal)]
    assert await attempts(database) == 3
    paused = [log for log in logs if log["event"] == "mail_paused"]
    assert {log["smtp_code"] for log in paused} == {int(refusal[:3])}
    assert {log["log_level"] for log in logs if log.get("outcome") == "given_back"} == {"debug"}
    assert refusal[4:] not in str(logs)


async def test_outage_of_postgres_after_the_acceptance_does_not_send_the_email_again(
    worker_settings, mail_server, link, mail_link, database, intended
):
    settings = settings_with(worker_settings, database_url=link.url, smtp_url=mail_link.url)
    mail_link.hold_before(b"Message-ID:")

    with capture_logs() as logs:
        async with open_postman(settings) as postman, running(postman.run):
            await eventually(mail_link.marker_reached.is_set)
            await link.refuse()
            mail_link.resume()
            await eventually(lambda: mail_server.accepted)
            await eventually(lambda: link.refused >= 3)
            link.admit()
            await eventually(lambda: all_are(database, "sent"))

    assert {log["event"] for log in logs} == {
        "emails_not_claimed",
        "batch_waits_for_postgres",
        "email_handled",
    }
    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]
    assert [event_type for event_type, _, _ in await announced(database)] == ["request.email_sent"]


async def test_failing_claim_does_not_lose_the_acceptance_of_an_email_under_way(
    worker_settings, mail_server, mail_link, database, intended
):
    """As on a standby, which has no unlogged tables: that error is not treated as an outage of Postgres."""
    mail_link.hold_before(b"Message-ID:")
    settings = settings_with(worker_settings, smtp_url=mail_link.url)

    with capture_logs() as logs:
        async with open_postman(settings) as postman, running(postman.run):
            await eventually(mail_link.marker_reached.is_set)
            await database.execute("ALTER TABLE postgres_up RENAME TO elsewhere")
            await eventually(lambda: "emails_not_claimed" in str(logs))
            mail_link.resume()
            await eventually(lambda: mail_server.accepted)
            await database.execute("ALTER TABLE elsewhere RENAME TO postgres_up")
            await eventually(lambda: all_are(database, "sent"))

    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]
