"""Reads the mailbox of MAIL_FROM, and records which of the sent e-mails have bounced.

Most mail servers accept an e-mail first, and report later that it cannot be delivered (reports.py). What
becomes of a message in the mailbox:

- recipient, sender: the report changed the e-mail from sent to failed, and names this fault. It is removed.
- repeated: the e-mail had failed before, for instance by a report of which only the removal failed. Removed.
- delayed: the e-mail may still be delivered. Otherwise another report follows. Removed.
- kept: no report of an e-mail that is in the ledger, such as a person's answer. It is flagged, and stays.
- waiting: the e-mail is still pending, because its report came sooner than the reply of the mail server was
  recorded. Or its row is locked. The message is looked at again.

A report is recorded before it is removed. Two processes may read the same one: only a sent e-mail can bounce.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
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
from service.server.probes import NotReady
from service.telemetry import logs
from worker import metrics
from worker.mail import mailbox, reports
from worker.mail.mailbox import Mailbox, MailboxUnavailable, MailboxUnfit
from worker.mail.reports import Report
from worker.settings import EmailSettings

_MOST_AT_ONCE = 200  # messages of one look
_BATCH = 20  # messages that are in memory at the same time, and recorded in one transaction
_TURN_SECONDS = 120.0  # for which no other process looks
_LONGEST_LOOK_SECONDS = 100.0

Outcome: TypeAlias = Literal["recipient", "sender", "repeated", "delayed", "kept", "waiting"]

_log = structlog.get_logger()


class Found(NamedTuple):
    """A message in the mailbox, and what it reports, if anything."""

    uid: int
    received_at: datetime | None
    report: Report | None


class BounceReader:
    """Looks into the mailbox at intervals. The processes take turns, by Postgres's clock.

    A lock of a session would not do, because a pooler may give the session to others. A lock of a row would
    need a transaction that stays open while the IMAP server answers.
    """

    def __init__(self, settings: EmailSettings, pool: Pool, relay: RelayWaker) -> None:
        self._settings = settings
        self._keys = SecretKeyRing.parse(settings.request_secret_keys)
        self._pool = pool
        self._relay = relay
        self._seconds = settings.work_timeout_seconds
        self._unfit: MailboxUnfit | None = None  # that the latest look of this process found

    async def check(self) -> None:
        """Raise NotReady if the mailbox can never be read as it should."""
        if self._unfit:
            raise NotReady(f"BOUNCES_URL: {self._unfit}")

    async def run(self, stop: asyncio.Event) -> None:
        """Look at intervals until *stop*, which interrupts a look."""
        async with in_background("bounces", self._keep_looking):
            await stop.wait()

    async def _keep_looking(self) -> None:
        while True:
            try:
                has_more = await self.look_in_turn()
            except PostgresUnavailable as error:
                _log.warning("bounces_not_recorded", error=logs.summarize(error))
                has_more = False
            if not has_more:
                await asyncio.sleep(self._settings.bounces_poll_seconds)

    async def look_in_turn(self) -> bool:
        """Look, unless another process does or has just done so. Returns whether to look again at once."""
        async with connections.acquired(self._pool, seconds=self._seconds) as connection:
            if not await _begin_turn(connection, seconds=_TURN_SECONDS):
                return False
        has_more, has_looked = False, True
        try:
            async with asyncio.timeout(_LONGEST_LOOK_SECONDS):
                has_more = await self.look()
            self._unfit = None
        except (MailboxUnavailable, TimeoutError) as error:
            self._unfit = error if isinstance(error, MailboxUnfit) else None
            has_looked = False
            _log.warning("bounces_not_read", reason=str(error) or "it took too long")
        pause = 0.0 if has_more else self._settings.bounces_poll_seconds
        async with connections.acquired(self._pool, seconds=self._seconds) as connection:
            await _end_turn(connection, pause_seconds=pause, has_looked=has_looked)
        return has_more

    async def look(self) -> bool:
        """Sort the first new messages. Returns whether there may be more. Raises MailboxUnavailable."""
        counted: Counter[Outcome] = Counter()
        async with mailbox.opened(self._settings) as opened:
            uids = await opened.in_thread(partial(opened.find, _MOST_AT_ONCE))
            for start in range(0, len(uids), _BATCH):
                found = await opened.in_thread(partial(self._read, opened, uids[start : start + _BATCH]))
                outcomes = await self._record(found)
                sorted_ = defaultdict(list)
                for message, outcome in zip(found, outcomes, strict=True):
                    sorted_[outcome if outcome in {"kept", "waiting"} else "handled"].append(message.uid)
                await opened.in_thread(partial(opened.sort, sorted_["handled"], sorted_["kept"]))
                counted.update(outcomes)
        for outcome, count in counted.items():
            metrics.bounces.labels(outcome).inc(count)
        if counted:
            _log.info("bounces_read", outcomes=dict(counted))
        return len(uids) == _MOST_AT_ONCE and counted.total() > counted["waiting"]

    def _read(self, opened: Mailbox, uids: Sequence[int]) -> list[Found]:
        """Read messages and, in the same thread, what they report."""
        return [
            Found(each.uid, each.received_at, reports.read(each.content, self._keys))
            for each in opened.read(uids)
        ]

    async def _record(self, found: Sequence[Found]) -> list[Outcome]:
        async with connections.transaction(self._pool, seconds=self._seconds) as connection:
            outcomes = await record(connection, found)
        self._relay.wake()
        return outcomes


async def record(connection: Connection, found: Sequence[Found]) -> list[Outcome]:
    """Record and announce bounces in the caller's transaction. Returns the outcome of each message."""
    final = {report.email: report for *_, report in reversed(found) if report and not report.is_delayed}
    async with change_all(connection, {email.request_id for email in final}, waits=False) as requests:
        sent = [(EmailId(*id_), trace) for *id_, trace in await connection.fetch(_LOCK_SENT, list(requests))]
        ends = [_end(final[email], trace) for email, trace in sent if email in final]
        await announce_ends(connection, ends, requests)
    rows = await connection.fetch(_READ_STATES, [email.request_id for email in final])
    states = {EmailId(*id_): (state, hour_ago) for *id_, state, hour_ago in rows}
    bounced = {end.id for end in ends}
    outcomes = []
    for message in found:
        outcomes.append(_outcome(message, bounced, states))
        if message.report:
            bounced.discard(message.report.email)  # Another report of the same e-mail is a repeat.
    return outcomes


def _end(report: Report, traceparent: str | None) -> EmailEnd:
    return EmailEnd(report.email, report.reply.words, "bounced", report.reply.code, traceparent)


def _outcome(
    message: Found, bounced: Collection[EmailId], states: Mapping[EmailId, tuple[str, datetime]]
) -> Outcome:
    report = message.report
    if report is None:
        return "kept"
    if report.is_delayed:
        return "delayed"
    if report.email in bounced:
        return "sender" if report.reply.fault == "sender" else "recipient"
    if report.email not in states:  # The request was erased, or a restore has lost the e-mail.
        return "kept"
    state, hour_ago = states[report.email]
    if state == "failed":
        return "repeated"
    is_old = state == "pending" and message.received_at and message.received_at < hour_ago
    return "kept" if is_old else "waiting"


# Requests are locked before their e-mails. So only a transaction that an operator has opened by hand, and
# that changes a sent e-mail, makes a report wait.
_LOCK_SENT = """
    SELECT request_id, number, kind, traceparent
      FROM email
     WHERE request_id = ANY($1)
       AND state = 'sent'
     ORDER BY request_id, number
       FOR UPDATE SKIP LOCKED
"""

# Without the e-mails of erased requests. LIMIT keeps a generic plan from reading the whole table.
_READ_STATES = """
    SELECT request_id, number, kind, state, now() - interval '1 hour'
      FROM email
     WHERE request_id = ANY($1)
       AND (SELECT true FROM calculation_request WHERE id = email.request_id LIMIT 1)
"""


async def _begin_turn(connection: Connection, *, seconds: float) -> bool:
    """Keep other processes from looking for *seconds*. Returns False if another one does so now."""
    began = await connection.fetchval(
        """
        UPDATE bounce_mailbox
           SET next_look_at = now() + make_interval(secs => $1)
         WHERE next_look_at <= now()
        RETURNING true
        """,
        seconds,
    )
    return began is not None


async def _end_turn(connection: Connection, *, pause_seconds: float, has_looked: bool) -> None:
    await connection.execute(
        """
        UPDATE bounce_mailbox
           SET next_look_at = now() + make_interval(secs => $1),
               looked_at = CASE WHEN $2 THEN now() ELSE looked_at END
        """,
        pause_seconds,
        has_looked,
    )


async def seconds_since_look(connection: Connection) -> float:
    """Return the seconds since a process last read the mailbox or, if none has, since the schema was made."""
    seconds: float = await connection.fetchval(
        "SELECT extract(epoch FROM now() - looked_at)::float8 FROM bounce_mailbox"
    )
    return seconds


async def read_gauges(connection: Connection) -> None:
    """Set the gauge of the time since the last look."""
    metrics.bounces_look_age.set(await seconds_since_look(connection))
