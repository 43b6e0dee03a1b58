"""Reads the mailbox of MAIL_FROM, and records which sent e-mails have bounced.

worker/README.md has the outcomes. A report is recorded before it is removed. Two processes may read the same
one: only a sent e-mail can bounce.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import structlog

from service.calculation_requests.changing import change_all
from service.calculation_requests.email_changes import EmailEnd, EmailId, announce_ends
from service.calculation_requests.request_secrets import SecretKeyRing
from service.outbox.waking import RelayWaker
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.server.background import in_background
from service.telemetry import logs
from worker import metrics
from worker.mail import mailbox, reports
from worker.mail.mailbox import Mailbox, MailboxUnavailable
from worker.mail.reports import Report
from worker.settings import EmailSettings

_MOST_AT_ONCE = 200  # messages of one look
_BATCH = 20  # messages that are in memory at the same time, and recorded in one transaction
_LONGEST_LOOK_SECONDS = 100.0

Outcome: TypeAlias = Literal["recipient", "sender", "repeated", "delayed", "kept", "waiting"]

_log = structlog.get_logger()


class Found(NamedTuple):
    """A message in the mailbox, and what it reports, if anything."""

    uid: int
    received_at: datetime  # by the IMAP server's clock
    report: Report | None


class BounceReader:
    """Looks into the mailbox at intervals. The processes take turns."""

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
                why = str(error) if isinstance(error, MailboxUnavailable) else logs.summarize(error)
                _log.warning("bounces_not_read", reason=why)
            await asyncio.sleep(self._settings.bounces_poll_seconds)

    async def look_in_turn(self) -> None:
        """Look, unless another process has begun to look within BOUNCES_POLL_SECONDS."""
        async with connections.acquired(self._pool, seconds=self._seconds) as connection:
            is_our_turn = await connection.fetchval(_TAKE_TURN, self._settings.bounces_poll_seconds)
        if is_our_turn:
            async with asyncio.timeout(_LONGEST_LOOK_SECONDS):
                await self.look()
            async with connections.acquired(self._pool, seconds=self._seconds) as connection:
                await connection.execute("UPDATE bounce_mailbox SET looked_at = now()")

    async def look(self) -> None:
        """Sort the first new messages. Raises MailboxUnavailable."""
        counted: Counter[Outcome] = Counter()
        async with mailbox.opened(self._settings) as opened:
            uids = await opened.in_thread(partial(opened.find, _MOST_AT_ONCE))
            for start in range(0, len(uids), _BATCH):
                found = await opened.in_thread(partial(self._read, opened, uids[start : start + _BATCH]))
                async with connections.transaction(self._pool, seconds=self._seconds) as connection:
                    outcomes = await record(connection, found)
                self._relay.wake()
                by_uid = {message.uid: outcome for message, outcome in zip(found, outcomes, strict=True)}
                await opened.in_thread(partial(_sort, opened, by_uid))
                counted.update(outcomes)
        for outcome, count in counted.items():
            metrics.bounces.labels(outcome).inc(count)
        if counted:
            _log.info("bounces_read", outcomes=dict(counted))

    def _read(self, opened: Mailbox, uids: Sequence[int]) -> list[Found]:
        return [
            Found(uid, received_at, reports.read(content, self._keys))
            for uid, received_at, content in opened.read(uids)
        ]


# A lock would not do: a pooler may give a session's lock to others, and a row's lock would need a transaction
# that stays open while the IMAP server answers.
_TAKE_TURN = """
    UPDATE bounce_mailbox
       SET next_look_at = now() + make_interval(secs => $1)
     WHERE next_look_at <= now()
    RETURNING true
"""


def _sort(opened: Mailbox, by_uid: dict[int, Outcome]) -> None:
    kept = [uid for uid, outcome in by_uid.items() if outcome == "kept"]
    opened.sort([uid for uid, outcome in by_uid.items() if outcome not in {"kept", "waiting"}], kept)


async def record(connection: Connection, found: Sequence[Found]) -> list[Outcome]:
    """Record and announce bounces in the caller's transaction. Returns the outcome of each message."""
    final = {report.email: report for *_, report in reversed(found) if report and not report.is_delayed}
    async with change_all(connection, {email.request_id for email in final}, waits=False) as requests:
        rows = await connection.fetch(_LOCK, list(requests))
        states = {EmailId(*id_): (state, trace) for *id_, state, trace in rows}
        bounced = {
            email: trace for email, (state, trace) in states.items() if state == "sent" and email in final
        }
        ends = [
            EmailEnd(email, final[email].reply.words, "bounced", final[email].reply.code, trace)
            for email, trace in bounced.items()
        ]
        await announce_ends(connection, ends, requests)
    an_hour_ago = await connection.fetchval("SELECT now() - interval '1 hour'")
    outcomes: list[Outcome] = []
    for _, received_at, report in found:
        if report is None:
            outcomes.append("kept")
        elif report.is_delayed:
            outcomes.append("delayed")
        elif report.email in bounced:
            del bounced[report.email]  # Another report of the same e-mail is a repeat.
            outcomes.append("sender" if report.reply.fault == "sender" else "recipient")
        elif states.get(report.email, ("",))[0] in {"sent", "failed"}:
            outcomes.append("repeated")
        else:  # The e-mail is pending, its row is locked, or its request was erased.
            outcomes.append("waiting" if received_at > an_hour_ago else "kept")
    return outcomes


# Without the rows that another transaction has locked.
_LOCK = """
    SELECT request_id, number, kind, state, traceparent
      FROM email
     WHERE request_id = ANY($1)
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
