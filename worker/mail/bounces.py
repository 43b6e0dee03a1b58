"""Reads the mailbox of MAIL_FROM, and records which sent e-mails have bounced.

worker/README.md has what becomes of each message. A report is recorded before it is removed. Two processes
may read the same one: only a sent e-mail can bounce.
"""

import asyncio
from collections.abc import Mapping
from functools import partial

import structlog

from service.calculation_requests.changing import change_all
from service.calculation_requests.email_changes import EmailEnd, EmailId, announce_ends
from service.calculation_requests.request_secrets import SecretKeyRing
from service.command_line.connecting import reason
from service.outbox.waking import RelayWaker
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.server.background import in_background
from worker import metrics
from worker.mail import mailbox, reports
from worker.mail.mailbox import MailboxUnavailable
from worker.mail.replies import Reply
from worker.settings import EmailSettings

_log = structlog.get_logger()


class BounceReader:
    """Looks into the mailbox at intervals."""

    def __init__(self, settings: EmailSettings, pool: Pool, relay: RelayWaker) -> None:
        self._settings = settings
        self._keys = SecretKeyRing.parse(settings.request_secret_keys)
        self._pool = pool
        self._relay = relay
        self._seconds = settings.work_timeout_seconds

    async def run(self, stop: asyncio.Event) -> None:
        """Look at intervals until *stop*, which does not wait for the end of a look."""
        async with in_background("bounces", self._keep_looking):
            await stop.wait()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._settings.bounces_poll_seconds)  # also after an unexpected error
            try:
                await self.look_in_turn()
            except (MailboxUnavailable, PostgresUnavailable) as error:
                _log.warning("bounces_not_read", reason=reason(error))

    async def look_in_turn(self) -> None:
        """Look, unless a process has just read the mailbox. A look that fails keeps no other process away."""
        async with connections.acquired(self._pool, seconds=self._seconds) as connection:
            # Postgres' clock may be slower than ours by a little.
            if await seconds_since_look(connection) < 0.9 * self._settings.bounces_poll_seconds:
                return
        await self.look()
        async with connections.acquired(self._pool, seconds=self._seconds) as connection:
            await connection.execute("UPDATE bounce_mailbox SET looked_at = now()")

    async def look(self) -> None:
        """Handle the newest new messages. Raises MailboxUnavailable."""
        await mailbox.in_thread(partial(self._look, asyncio.get_running_loop()))

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Record what messages report, then mark those that were handled and those that are for people."""
        with mailbox.opened(self._settings) as opened:
            read = ((uid, opened.beginning_of(uid)) for uid in opened.find_new())
            found = {uid: reports.read(content, self._keys) for uid, content in read if content is not None}
            failures = {each.email: each.failure for each in found.values() if each and each.failure}
            has_ended: dict[EmailId, bool] = {}
            if failures:
                has_ended = asyncio.run_coroutine_threadsafe(self._record(failures), loop).result()
            handled, for_people = [], []
            for uid, report in found.items():
                if report and (report.failure is None or has_ended.get(report.email)):
                    handled.append(uid)
                # A report whose e-mail is pending or locked is read again until the e-mail has ended.
                elif not report or report.email not in has_ended:
                    for_people.append(uid)
            opened.mark(handled, for_people)

    async def _record(self, failures: Mapping[EmailId, Reply]) -> dict[EmailId, bool]:
        """Record and announce bounces. Returns which e-mails exist, and whether they have ended by now."""
        ids = {email.request_id for email in failures}
        async with (
            connections.transaction(self._pool, seconds=self._seconds) as connection,
            change_all(connection, ids, waits=False) as requests,
        ):
            has_ended = {EmailId(*row): False for row in await connection.fetch(_FIND, ids)}
            bounced = []
            for *id_, state, trace in await connection.fetch(_LOCK_ENDED, list(requests)):
                email = EmailId(*id_)
                has_ended[email] = True
                if state == "sent" and email in failures:
                    failure = failures[email]
                    bounced.append(EmailEnd(email, failure.words, "bounced", failure.code, trace))
            await announce_ends(connection, bounced, requests)
        self._relay.wake()
        for end in bounced:
            metrics.bounces.labels("sender" if reports.blames_us(failures[end.id]) else "recipient").inc()
        _log.info("bounces_read", failures=len(failures), bounced=len(bounced))
        return has_ended


# Without those whose request was erased.
_FIND = """
    SELECT request_id, number, kind
      FROM email
      JOIN calculation_request AS request ON request.id = request_id
     WHERE request_id = ANY($1)
"""

# Without the rows that another transaction has locked.
_LOCK_ENDED = """
    SELECT request_id, number, kind, state, traceparent
      FROM email
     WHERE request_id = ANY($1)
       AND state IN ('sent', 'failed')
     ORDER BY request_id, number
       FOR UPDATE SKIP LOCKED
"""


async def seconds_since_look(connection: Connection) -> float:
    """Return the seconds since a process last read the mailbox or, if none has, since the schema was made."""
    seconds: float = await connection.fetchval(
        "SELECT extract(epoch FROM now() - looked_at)::float8 FROM bounce_mailbox"
    )
    return seconds


async def read_gauges(connection: Connection) -> None:
    """Set the gauge of the time since the last look."""
    metrics.bounces_look_age.set(await seconds_since_look(connection))
