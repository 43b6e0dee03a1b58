"""Finds what does not add up: requests, events, e-mails. For `reconcile`, and as metrics."""

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec
import structlog

from service.identifiers import first_id_at, uuid_of
from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.server.background import in_background
from service.telemetry import logs
from worker import metrics

_EXAMPLES = 10
_INTERVAL_SECONDS = 300.0
_WINDOW = timedelta(days=1)  # Older requests are not looked at again and again: `reconcile` checks them.
_LONGEST_LOOK_SECONDS = 30.0
_REST_FACTOR = 20  # The rest after a look is at least this many times as long as the look.
_LOCK = 0x5D17_0002  # an advisory lock, held by the replica that looks

_log = structlog.get_logger()


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The first request to check, and how long each step may take."""

    first_id: UUID = UUID(int=0)
    event_seconds: float = 300.0  # until an event is published, and its e-mail is in the ledger
    email_seconds: float = 3600.0  # until the mail server accepts or refuses an e-mail


class Anomaly(msgspec.Struct, frozen=True):
    """Something that should not exist: how many requests it concerns, and the first of them."""

    name: str
    meaning: str
    count: int
    uuids: list[str]


class _Check(msgspec.Struct, frozen=True):
    name: str
    meaning: str
    statement: str  # of request_id; $1 is the first id, $2 the seconds
    seconds: float | None = None


async def find_anomalies(connection: Connection, limits: Limits) -> list[Anomaly]:
    """Return every anomaly, also those with a count of 0.

    Needs a transaction with isolation level REPEATABLE READ, so that all tables are of one moment.
    """
    return [await _find(connection, check, limits.first_id) for check in _checks(limits)]


def _checks(limits: Limits) -> list[_Check]:
    unpublished = f"not published for over {limits.event_seconds:g} s"
    unmailed = f"published over {limits.event_seconds:g} s ago, but not in the ledger of e-mails"
    unanswered = f"neither accepted nor refused for over {limits.email_seconds:g} s"
    return [
        _Check("request_without_email", unmailed, _REQUESTS_WITHOUT_EMAIL, limits.event_seconds),
        _Check("email_overdue", unanswered, _OVERDUE_EMAILS, limits.email_seconds),
        _Check("event_overdue", unpublished, _OVERDUE_EVENTS, limits.event_seconds),
        _Check("event_orphaned", "an event about a request that never existed", _ORPHANED_EVENTS),
        _Check("sequence_wrong", "has more or fewer events than its rows account for", _WRONG_SEQUENCES),
    ]


async def read_ids_without_email(connection: Connection, limits: Limits) -> list[UUID]:
    """Return the ids of `request_without_email`."""
    rows = await connection.fetch(
        f"{_REQUESTS_WITHOUT_EMAIL} ORDER BY id", limits.first_id, limits.event_seconds
    )
    return [row["request_id"] for row in rows]


async def _find(connection: Connection, check: _Check, first_id: UUID) -> Anomaly:
    rows = await connection.fetch(
        f"""
        SELECT request_id, count(*) OVER () AS total
          FROM ({check.statement}) AS found
         ORDER BY request_id
         LIMIT {_EXAMPLES}
        """,  # noqa: S608 - constants only
        first_id,
        *(() if check.seconds is None else (check.seconds,)),
    )
    count = rows[0]["total"] if rows else 0
    return Anomaly(check.name, check.meaning, count, [uuid_of(row["request_id"]) for row in rows])


class Discrepancies:
    """Looks for anomalies of recent requests, as `python -m worker reconcile` does for all."""

    def __init__(self, pool: Pool, *, interval_seconds: float = _INTERVAL_SECONDS) -> None:
        self._pool = pool
        self._interval_seconds = interval_seconds

    async def run(self, stop: asyncio.Event) -> None:
        """Look at every interval until *stop*, which interrupts a look."""
        async with in_background("reconciliation", self._keep_looking):
            await stop.wait()

    async def _keep_looking(self) -> None:
        interval = self._interval_seconds
        await asyncio.sleep(random.uniform(0, interval))  # noqa: S311 - spreads the replicas, keeps no secret
        while True:
            began = time.monotonic()
            await self.look()
            await asyncio.sleep(max(interval, _REST_FACTOR * (time.monotonic() - began)))

    async def look(self) -> None:
        """Look once, unless another replica is looking. Without a look the gauges keep their values."""
        limits = Limits(first_id=first_id_at(datetime.now(UTC) - _WINDOW))
        try:
            async with loans.transaction(self._pool, seconds=_LONGEST_LOOK_SECONDS) as connection:
                await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                if not await loans.try_lock(connection, _LOCK):
                    return
                anomalies = await find_anomalies(connection, limits)
        except PostgresUnavailable as error:
            _log.warning("reconciliation_failed", error=logs.summarize(error))
            return
        for anomaly in anomalies:
            metrics.discrepancies.labels(anomaly.name).set(anomaly.count)
        metrics.reconciled_at.set_to_current_time()


_REQUESTS_WITHOUT_EMAIL = """
    SELECT id AS request_id
      FROM calculation_request AS request
     WHERE id >= $1
       AND created_at < now() - make_interval(secs => $2)
       AND NOT EXISTS (SELECT
                         FROM email
                        WHERE email.request_id = request.id)
       AND NOT EXISTS (SELECT
                         FROM outbox
                        WHERE outbox.request_id = request.id)
       AND NOT EXISTS (SELECT
                         FROM outbox_held
                        WHERE outbox_held.request_id = request.id)
"""

_OVERDUE_EMAILS = """
    SELECT DISTINCT request_id
      FROM email
     WHERE request_id >= $1
       AND state = 'pending'
       AND created_at < now() - make_interval(secs => $2)
"""

_OVERDUE_EVENTS = """
    SELECT request_id
      FROM (SELECT request_id, created_at
              FROM outbox
            UNION ALL
            SELECT request_id, created_at
              FROM outbox_held) AS event
     WHERE request_id >= $1
       AND created_at < now() - make_interval(secs => $2)
"""

_ORPHANED_EVENTS = """
    SELECT request_id
      FROM (SELECT request_id
              FROM outbox
            UNION ALL
            SELECT request_id
              FROM outbox_held) AS event
     WHERE request_id >= $1
       AND NOT EXISTS (SELECT
                         FROM calculation_request AS request
                        WHERE request.id = event.request_id)
       AND NOT EXISTS (SELECT
                         FROM erased_request AS erased
                        WHERE erased.id = event.request_id)
"""

# One event for the request itself, one for each settled e-mail, one for its calculation.
_WRONG_SEQUENCES = """
    SELECT request.id AS request_id
      FROM calculation_request AS request
      LEFT JOIN (SELECT request_id,
                        count(settled_at) AS settled,
                        bool_or((settled_at IS NULL) <> (event_sequence IS NULL)) AS is_wrong,
                        array_agg(event_sequence) AS sequences,
                        count(DISTINCT event_sequence) AS different,
                        min(event_sequence) AS lowest,
                        max(event_sequence) AS highest
                   FROM email
                  WHERE request_id >= $1
                  GROUP BY request_id) AS emails
        ON emails.request_id = request.id
     WHERE request.id >= $1
       AND (request.sequence <> 1 + (request.calculation_id IS NOT NULL)::integer
                                  + coalesce(emails.settled, 0)
            OR (request.calculation_id IS NULL) <> (request.calculation_sequence IS NULL)
            OR emails.is_wrong
            OR request.calculation_sequence NOT BETWEEN 2 AND request.sequence
            OR emails.lowest < 2
            OR emails.highest > request.sequence
            OR emails.different < emails.settled
            OR request.calculation_sequence = ANY(emails.sequences))
"""
