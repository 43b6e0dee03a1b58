"""Outages of the mail server and of Postgres lose no e-mail, charge no attempt and send none twice."""

from collections import Counter

import pytest

from tests.harness.databases import failing_for_all_roles
from tests.harness.in_process import running
from tests.harness.mail_server import ScriptedMailServer, Session
from tests.harness.waiting import eventually
from tests.worker.conftest import postman_held_before, running_postman
from tests.worker.steps import all_are, announced, record_emails

ATTEMPTS = "SELECT sum(attempts) FROM email"
LOGIN_OFFER = b"250-mail.example.com\r\n250 AUTH PLAIN LOGIN"


class LimitedMailServer(ScriptedMailServer):
    """Accepts so many connections, logins and e-mails over each connection, and blames us for a recipient."""

    def __init__(
        self, *, connections: int = 100, logins: int = 100, emails: int = 100, answer: bytes | None = None
    ) -> None:
        super().__init__()
        self._connections, self._logins, self._emails = connections, logins, emails
        self._answer = answer  # to an e-mail too many
        self._began: Counter[Session] = Counter()

    async def reply_to(self, session: Session, command: str, sent: bytes) -> bytes | None:
        self._began[session] += command == "MAIL"
        if command == "greeting" and self.open_connections > self._connections:
            session.closes_after_reply = True
            return b"421 Too many concurrent SMTP connections"
        if command == "AUTH" and self.commands["AUTH"] > self._logins:
            return b"535 5.7.8 Authentication credentials invalid"
        if command == "MAIL" and self._began[session] > self._emails:
            return self._answer
        if command == "RCPT" and b"<unlucky@" in sent:
            return b"554 5.7.1 Relay access denied"
        return await super().reply_to(session, command, sent)


async def test_unreachable_mail_server_counts_no_attempt(postman, mail_server, database, intended):
    released = "claimed_by IS NULL AND attempts = 0 AND created_at < next_attempt_at"
    refused = "server_reply = 'no connection: connection refused'"
    is_released = f"SELECT {released} AND {refused} FROM email"  # noqa: S608 - constants only
    mail_server.stop()

    async with running(postman.run):
        await eventually(lambda: database.fetchval(is_released))
        await mail_server.start()
        await eventually(lambda: all_are(database, "sent"))

    assert await database.fetchval(ATTEMPTS) == 1
    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]


@pytest.mark.parametrize(
    ("command", "refusal"),
    [
        ("greeting", "554 No mail from calculations@service.example.com"),
        ("AUTH", "535 5.7.8 Authentication credentials invalid"),
        ("MAIL", "550 Sender \0 refused"),
    ],
)
async def test_refusing_server_gets_few_tries(worker_settings, rude_server, database, command, refusal, logs):
    await record_emails(database, 20)
    rude_server.replies["EHLO"] = LOGIN_OFFER
    usual, rude_server.replies[command] = rude_server.replies.get(command, b"235 OK"), refusal.encode()
    url = rude_server.url.replace("//", "//us:secret@" if command == "AUTH" else "//")

    def pauses() -> list[float]:
        return [log["pause_seconds"] for log in logs if log["event"] == "mail_paused"]

    async with running_postman(worker_settings, smtp_url=url, email_concurrency=2):
        await eventually(lambda: len(pauses()) >= 7)
        tries, connections = len(pauses()), rude_server.connections
        open_connections, logins = rude_server.open_connections, rude_server.commands["AUTH"]
        shown = await database.fetch("SELECT attempts, server_reply FROM email WHERE server_reply <> ''")
        rude_server.replies[command] = usual
        await eventually(lambda: all_are(database, "sent"))

    assert connections <= tries + 1
    assert logins <= (rude_server.connections if command == "AUTH" else 0)
    assert open_connections <= 2
    assert pauses()[6] > 2 * pauses()[4] > 0.3
    assert {*shown} == {(0, refusal.replace("\0", "\N{REPLACEMENT CHARACTER}"))}
    assert len(shown) >= 7  # each time another e-mail
    assert await database.fetchval(ATTEMPTS) == 20
    assert {log["smtp_code"] for log in logs if log["event"] == "mail_paused"} == {int(refusal[:3])}
    assert refusal[4:] not in str(logs)


@pytest.mark.parametrize("limits", [{"connections": 2}, {"logins": 2}], ids=["connections", "logins"])
async def test_open_connections_go_on_while_no_other_can_be_opened(worker_settings, database, limits, logs):
    await record_emails(database, 60)
    async with LimitedMailServer(**limits) as server:
        server.replies |= {"EHLO": LOGIN_OFFER, "AUTH": b"235 OK"}
        url = server.url.replace("//", "//us:secret@")
        async with running_postman(worker_settings, smtp_url=url, email_concurrency=8):
            await eventually(lambda: all_are(database, "sent"))

    pauses = sum(log["event"] == "mail_paused" for log in logs)
    assert len(server.contents) == 60
    assert 2 < server.connections <= 8 + pauses


@pytest.mark.parametrize("answer", [None, b"421 Enough", b"452 Too many e-mails", b"nonsense"])
async def test_email_refused_at_mail_takes_another_connection(worker_settings, database, answer, logs):
    await record_emails(database, 5)
    async with (
        LimitedMailServer(emails=1, answer=answer) as server,
        running_postman(worker_settings, smtp_url=server.url, email_concurrency=1),
    ):
        await eventually(lambda: all_are(database, "sent"))

    assert server.connections == len(server.contents) == await database.fetchval(ATTEMPTS) == 5
    assert "mail_paused" not in str(logs)


async def test_recipients_refused_as_if_we_were_at_fault_delay_no_others(worker_settings, database, logs):
    await record_emails(database, 40, customer_email="unlucky@customer.example.com")
    await record_emails(database, 10)
    ten_are_sent = "SELECT count(*) = 10 FROM email WHERE state = 'sent'"
    async with (
        LimitedMailServer() as server,
        running_postman(worker_settings, smtp_url=server.url, email_concurrency=2),
    ):
        await eventually(lambda: database.fetchval(ten_are_sent))

    assert "mail_paused" not in str(logs)
    unsent = await database.fetch("SELECT DISTINCT state, server_reply FROM email WHERE state <> 'sent'")
    assert unsent == [("pending", "554 5.7.1 Relay access denied")]


@pytest.mark.usefixtures("intended")
async def test_failing_claim_and_an_outage_of_postgres_repeat_no_email(
    worker_settings, mail_server, link, mail_link, database, logs
):
    """The mail server accepts it meanwhile. Claims also fail on a standby, which has no unlogged tables."""
    async with postman_held_before(b"Message-ID:", mail_link, worker_settings, database_url=link.url):
        await database.execute(failing_for_all_roles("postgres_up"))
        await eventually(lambda: "background_work_failed" in str(logs))
        await link.refuse()
        mail_link.resume()
        await eventually(lambda: mail_server.accepted)
        await eventually(lambda: link.refused >= 3)
        link.admit()
        await database.execute("ALTER TABLE postgres_up DISABLE ROW LEVEL SECURITY")
        await eventually(lambda: all_are(database, "sent"))

    assert len(mail_server.accepted) == 1
    assert [kind for kind, _ in await announced(database)] == ["request.email_sent"]
