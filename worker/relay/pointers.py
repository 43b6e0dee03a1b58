"""The statements of one pass of the relay: lock pointers in outbox, read their events, settle them.

A pointer is locked only if no earlier one of its request is in outbox. So a request has at most one event in
a window, and its next event follows once this one is deleted. An event fails if RabbitMQ refuses, returns or
does not confirm it. Then it is held, with the later events of its request, until the time of its next
attempt. Once RabbitMQ has confirmed a held event, the later events of its request are pending again.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from service.calculation_requests import event_history
from service.outbox.events import in_envelope
from service.postgres.pool import Connection
from worker import metrics

# Postgres keeps the plan that it made while the tables were empty, and such a plan may read or sort the whole
# table. With these settings, every plan walks an index: for 1,000 of 100,000 events, 3 ms instead of 100.
# Before Postgres 18 they make a plan look so costly that it might be compiled (jit). No commit waits for the
# disk: if a crash of Postgres undoes it, the same events are published again, in order.
_OFF = ("enable_seqscan", "enable_sort", "enable_hashjoin", "enable_mergejoin", "jit", "synchronous_commit")
SETTINGS = "; ".join(f"SET LOCAL {name} = off" for name in _OFF)


class OutboxEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event whose pointer, a row of outbox, is locked."""

    ctid: tuple[int, int]  # the place of the pointer, which does not change while it is locked
    request_id: UUID
    sequence: int
    traceparent: str | None
    written: float  # created_at, by time.monotonic. The age is by Postgres's clock, which set created_at
    attempts: int
    is_held: bool
    type: str
    event_id: str  # also the AMQP message id
    time: datetime
    payload: bytes  # the message body


async def lock(connection: Connection, *, pending: int, held: int) -> list[OutboxEvent]:
    """Lock the oldest pending events, and those held events that have been due for longest.

    Each is the first of its request. Locked ones are left out. The events are read in a second statement,
    whose snapshot is younger than the locks. Otherwise an event would be published as it was before an
    erasure that was committed meanwhile.
    """
    pointers = await connection.fetch(_LOCK, pending, held, time.monotonic())
    by_request = {row["request_id"]: row for row in pointers}
    rows = await connection.fetch(_READ, list(by_request), [row["sequence"] for row in pointers])
    return [_event(by_request[row["request_id"]], row) for row in rows]


def _event(pointer: Mapping[str, Any], kept: Mapping[str, Any]) -> OutboxEvent:
    event = in_envelope(kept, pointer["traceparent"])
    payload = msgspec.json.encode(event)
    return OutboxEvent(**pointer, type=event.type, event_id=event.id, time=kept["time"], payload=payload)


# Postgres allows no FOR UPDATE with UNION, so each part locks its own rows. `IS NULL` is not written as NOT
# EXISTS, which Postgres could turn into a join that reads the whole table.
_FIRST = """
    (SELECT sequence
       FROM outbox AS earlier
      WHERE earlier.request_id = outbox.request_id
        AND earlier.sequence < outbox.sequence
      LIMIT 1) IS NULL"""
_POINTER = """
    ctid, request_id, sequence, traceparent, attempts, next_attempt_at IS NOT NULL AS is_held,
    $3 - extract(epoch FROM statement_timestamp() - created_at)::float8 AS written"""
_LOCK = f"""
    WITH pending AS MATERIALIZED (
        SELECT {_POINTER}
          FROM outbox
         WHERE next_attempt_at IS NULL
           AND {_FIRST}
         ORDER BY created_at
         LIMIT $1
           FOR UPDATE OF outbox SKIP LOCKED
    ), held AS MATERIALIZED (
        SELECT {_POINTER}
          FROM outbox
         WHERE next_attempt_at <= statement_timestamp()
           AND {_FIRST}
         ORDER BY next_attempt_at
         LIMIT $2
           FOR UPDATE OF outbox SKIP LOCKED
    )
    SELECT * FROM pending
     UNION ALL
    SELECT * FROM held
"""  # noqa: S608 - constants only


# With LIMIT, Postgres looks each event up in the primary key: 1.2 µs an event.
_READ = """
    SELECT request_id, sequence, type, time, data
      FROM unnest($1::uuid[], $2::integer[]) AS pointer (request_id, sequence)
     CROSS JOIN LATERAL (SELECT type, time, data
                           FROM event
                          WHERE event.request_id = pointer.request_id
                            AND event.sequence = pointer.sequence
                          LIMIT 1) AS event
"""


class PointersMissing(Exception):
    """Locked pointers are not in outbox."""


async def delete(connection: Connection, events: Sequence[OutboxEvent]) -> None:
    """Delete the pointers of confirmed events. The events that were held behind them are pending again."""
    deleted = await connection.execute(
        "DELETE FROM outbox WHERE ctid = ANY($1::tid[])", [event.ctid for event in events]
    )
    if deleted != f"DELETE {len(events)}":
        raise PointersMissing
    if held := [event.request_id for event in events if event.is_held]:
        await connection.execute(
            f"UPDATE outbox SET next_attempt_at = NULL WHERE ctid = ANY ({_FREE})",  # noqa: S608 - a constant
            held,
        )


# The pointers of the requests $1, but for those that a person has locked: a pass would wait for them. A
# pointer that is left as it is follows all the same, because it is not taken before an earlier one.
_FREE = "ARRAY (SELECT ctid FROM outbox WHERE request_id = ANY ($1) FOR UPDATE SKIP LOCKED)"


async def hold(
    connection: Connection, events: Sequence[OutboxEvent], errors: Mapping[str, str], *, base_seconds: float
) -> None:
    """Count an attempt for failed events, and hold them with the later events of their requests.

    *errors* are by event id. The events are due again after a delay that doubles with each attempt, up to
    five minutes. An event and those behind it are due at the same time, counted from this statement.
    """
    await connection.executemany(
        f"""
        UPDATE outbox
           SET attempts = attempts + (sequence = $2)::integer,
               last_error = CASE WHEN sequence = $2 THEN $4 ELSE last_error END,
               next_attempt_at = statement_timestamp()  -- not now(), which is before the publish
                                 + make_interval(secs => least(300, $5 * 2 ^ least($3, 30)))
         WHERE ctid = ANY ({_FREE})
        """,  # noqa: S608 - constants only
        [
            ([event.request_id], event.sequence, event.attempts, errors[event.event_id], base_seconds)
            for event in events
        ],
    )


async def read_gauges(connection: Connection) -> None:
    """Set the gauges of outbox and feeds. At most COUNT_LIMIT pending and as many held events are counted."""
    (row,) = await connection.fetch(
        """
        SELECT (SELECT count(*)
                  FROM (SELECT FROM outbox WHERE next_attempt_at IS NULL LIMIT $1) AS head) AS pending,
               (SELECT count(*) FILTER (WHERE attempts > 0)
                  FROM (SELECT attempts FROM outbox WHERE next_attempt_at IS NOT NULL LIMIT $1) AS head)
               AS retrying,
               (SELECT greatest(0, extract(epoch FROM now() - created_at))::float8
                  FROM outbox
                 WHERE next_attempt_at IS NULL
                 ORDER BY created_at
                 LIMIT 1) AS oldest_seconds
        """,
        metrics.COUNT_LIMIT,
    )
    metrics.outbox_pending.set(row["pending"])
    metrics.outbox_retrying.set(row["retrying"])
    metrics.outbox_oldest_age.set(row["oldest_seconds"] or 0)
    metrics.feed_held_back.set(await event_history.held_back_seconds(connection))
