"""Reads the mailbox of MAIL_FROM, and records which sent e-mails have bounced.

worker/README.md has what becomes of each message. A report is recorded before it is removed. Two processes
may read the same one: only a sent e-mail can bounce.
"""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
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
from worker.mail.mailbox import Mailbox, MailboxUnavailable, in_thread
from worker.mail.reports import Report
from worker.settings import EmailSettings

_BATCH = 20  # messages that are in memory at the same time, and recorded in one transaction
_LONGEST_LOOK_SECONDS = 100.0
_LONGEST_WAIT = timedelta(hours=1)  # of a report for the end of its e-mail

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
        """Look at intervals until *stop*, which interrupts a look."""
        async with in_background("bounces", self._keep_looking):
            await stop.wait()

    async def _keep_looking(self) -> None:
        while True:
            try:
                await self.look_in_turn()
            except (MailboxUnavailable, PostgresUnavailable, TimeoutError) as error:
                _log.warning("bounces_not_read", reason=reason(error))
            await asyncio.sleep(self._settings.bounces_poll_seconds)

    async def look_in_turn(self) -> None:
        """Look, unless a process has just read the mailbox. A look that fails keeps no other process away."""
        async with connections.acquired(self._pool, seconds=self._seconds) as connection:
            # Postgres' clock may be slower than ours by a little.
            if await seconds_since_look(connection) < 0.9 * self._settings.bounces_poll_seconds:
                return
        async with asyncio.timeout(_LONGEST_LOOK_SECONDS):
            await self.look()
        async with connections.acquired(self._pool, seconds=self._seconds) as connection:
            await connection.execute("UPDATE bounce_mailbox SET looked_at = now()")

    async def look(self) -> None:
        """Handle the first new messages. Raises MailboxUnavailable."""
        async with mailbox.opened(self._settings) as opened:
            uids = await in_thread(opened.find)
            for start in range(0, len(uids), _BATCH):
                await self._handle(opened, uids[start : start + _BATCH])

    async def _handle(self, opened: Mailbox, uids: Sequence[int]) -> None:
        """Record what messages report, then mark those that were handled and those that are for people."""
        messages = await in_thread(partial(opened.read, uids))
        found = [await in_thread(partial(reports.read, content, self._keys)) for *_, content in messages]
        ended = await self._record([report for report in found if report])
        handled, for_people = [], []
        for (uid, received_at, _), report in zip(messages, found, strict=True):
            if report and (report.failure is None or report.email in ended):
                handled.append(uid)
            # A report whose e-mail is pending, locked or erased is read again for an hour.
            elif not report or received_at < datetime.now(UTC) - _LONGEST_WAIT:
                for_people.append(uid)
        await in_thread(partial(opened.sort, handled, for_people))

    async def _record(self, found: Sequence[Report]) -> set[EmailId]:
        """Record and announce bounces. Returns those e-mails that have ended, now or before."""
        failures = {report.email: report.failure for report in reversed(found) if report.failure}
        request_ids = {email.request_id for email in failures}
        async with (
            connections.transaction(self._pool, seconds=self._seconds) as connection,
            change_all(connection, request_ids, waits=False) as requests,
        ):
            rows = await connection.fetch(_LOCK_ENDED, list(requests))
            ended = {EmailId(*id_): (state, trace) for *id_, state, trace in rows}
            bounced = [
                EmailEnd(email, failures[email].words, "bounced", failures[email].code, trace)
                for email, (state, trace) in ended.items()
                if state == "sent" and email in failures
            ]
            await announce_ends(connection, bounced, requests)
        self._relay.wake()
        for end in bounced:
            metrics.bounces.labels("sender" if reports.blames_us(failures[end.id]) else "recipient").inc()
        _log.info("bounces_read", reports=len(found), bounced=len(bounced))
        return set(ended)


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
