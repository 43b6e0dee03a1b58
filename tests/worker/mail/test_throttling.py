"""A mail server that limits the rate slows the postman down. No e-mail is lost, and no attempt is counted."""

import time

from tests.harness.in_process import running
from tests.harness.mail_server import ScriptedMailServer, Session
from tests.harness.waiting import eventually
from tests.worker.conftest import open_postman, settings_with
from tests.worker.mail.conftest import all_are, attempts, record_emails

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
