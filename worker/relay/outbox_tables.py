"""Reads and settles the events in the tables outbox and outbox_held. loop.py locks their lanes first.

An event fails if RabbitMQ refuses, returns or does not confirm it. Then `hold` moves it to outbox_held, and
`postpone` sets when it is due again. In the next pass, `read` finds that the later events of its request must
wait, and `hold` moves them, too. When the failed event is due, `read` returns it. Once RabbitMQ has confirmed
it, `delete` deletes it. A trigger in schema.sql then makes the next held event of its request due.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from service.identifiers import uuid_of
from service.outbox.events import event_id
from service.outbox.lanes import LANES
from service.postgres.pool import Connection
from worker import metrics


class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """An event in outbox or outbox_held."""

    lane: int
    id: int
    request_id: UUID
    type: str
    sequence: int
    traceparent: str | None
    payload: bytes
    created_at: datetime
    written: float  # at created_at, by time.monotonic: only Postgres's clock can be compared with created_at
    attempts: int
    is_held: bool  # in outbox_held
    must_wait: bool  # whether an earlier event of its request is in outbox_held

    @property
    def event_id(self) -> str:
        """The id of the event, also used as the AMQP message id."""
        return event_id(uuid_of(self.request_id), self.type, self.sequence)


async def find_lanes(connection: Connection) -> list[int]:
    """Return the lanes with events that can be published now."""
    rows = await connection.fetch(
        """
        SELECT lane
          FROM unnest($1::smallint[]) AS lane
         WHERE (SELECT id
                  FROM outbox
                 WHERE outbox.lane = lane.lane
                 ORDER BY id
                 LIMIT 1) IS NOT NULL
            OR (SELECT id
                  FROM outbox_held
                 WHERE outbox_held.lane = lane.lane
                   AND next_attempt_at <= now()
                 ORDER BY next_attempt_at
                 LIMIT 1) IS NOT NULL
        """,
        list(range(LANES)),
    )
    return [row["lane"] for row in rows]


async def read(connection: Connection, lanes: Sequence[int], *, pending: int, held: int) -> list[OutboxRow]:
    """Return the oldest events of locked lanes, at most *pending* of each lane, and held events that are due.

    There are at most *held* held events. Each is the first event of its request. Those that have never failed
    come first, then those that were due first.
    """
    rows = await connection.fetch(_READ, lanes, pending, held, time.monotonic())
    return [OutboxRow(**row) for row in rows]


# must_wait is not an EXISTS, with which Postgres reads all of outbox_held: with 100,000 held events, reading
# 1,000 pending events took 250 ms instead of 50. The NOT EXISTS keeps the order even if a person has made a
# later event of a request due.
_READ = """
    SELECT event.lane, id, request_id, type, sequence, traceparent, payload, created_at,
           $4 - extract(epoch FROM statement_timestamp() - created_at)::float8 AS written, 0 AS attempts,
           false AS is_held,
           (SELECT id
              FROM outbox_held
             WHERE outbox_held.request_id = event.request_id
             LIMIT 1) IS NOT NULL AS must_wait
      FROM unnest($1::smallint[]) AS lane
     CROSS JOIN LATERAL (SELECT *
                           FROM outbox
                          WHERE outbox.lane = lane.lane
                          ORDER BY outbox.id
                          LIMIT $2) AS event
     UNION ALL
   (SELECT event.lane, id, request_id, type, sequence, traceparent, payload, created_at,
           $4 - extract(epoch FROM statement_timestamp() - created_at)::float8, attempts, true, false
      FROM unnest($1::smallint[]) AS lane
     CROSS JOIN LATERAL (SELECT *
                           FROM outbox_held AS candidate
                          WHERE candidate.lane = lane.lane
                            AND next_attempt_at <= now()
                            AND NOT EXISTS (SELECT
                                              FROM outbox_held AS earlier
                                             WHERE earlier.request_id = candidate.request_id
                                               AND earlier.id < candidate.id)
                          ORDER BY next_attempt_at
                          LIMIT $3) AS event
     ORDER BY next_attempt_at
     LIMIT $3)
     ORDER BY is_held, id
"""


async def delete(connection: Connection, events: Sequence[OutboxRow]) -> None:
    """Delete events that the broker has confirmed."""
    for table, is_held in (("outbox", False), ("outbox_held", True)):
        if in_table := [event for event in events if event.is_held == is_held]:
            await connection.execute(
                f"""
                DELETE FROM {table}
                 USING unnest($1::smallint[], $2::bigint[]) AS confirmed (lane, id)
                 WHERE {table}.lane = confirmed.lane
                   AND {table}.id = confirmed.id
                """,  # noqa: S608 - constants only
                *_keys(in_table),
            )


async def hold(connection: Connection, events: Sequence[OutboxRow]) -> None:
    """Move events from outbox to outbox_held, due at once and with 0 attempts.

    `postpone` then counts an attempt for each event that has failed. Triggers make the others wait until the
    earlier events of their requests are deleted. Then they are due, ahead of all failed events.
    """
    if not events:
        return
    await connection.execute(
        """
        WITH moved AS (
            DELETE FROM outbox
             USING unnest($1::smallint[], $2::bigint[]) AS held (lane, id)
             WHERE outbox.lane = held.lane
               AND outbox.id = held.id
            RETURNING outbox.lane, outbox.id, request_id, type, sequence, traceparent, payload, created_at
        )
        INSERT INTO outbox_held (lane, id, request_id, type, sequence, traceparent, payload, created_at,
                                 attempts, next_attempt_at)
        SELECT lane, id, request_id, type, sequence, traceparent, payload, created_at, 0, '-infinity'
          FROM moved
         ORDER BY id -- The trigger must see the earlier events of a request.
        """,
        *_keys(events),
    )


async def postpone(
    connection: Connection, events: Sequence[OutboxRow], errors: Mapping[int, str], *, base_seconds: float
) -> None:
    """Count an attempt for held events that have failed, and store their errors, which are by row id.

    An event is due again after a delay that doubles with each attempt, up to five minutes.
    """
    if not events:
        return
    await connection.execute(
        """
        UPDATE outbox_held
           SET attempts = attempts + 1,
               last_error = failure.error,
               next_attempt_at = clock_timestamp()  -- not now(), which is before the publish
                                 + make_interval(secs => least(300, $4 * 2 ^ least(attempts, 30)))
          FROM unnest($1::smallint[], $2::bigint[], $3::text[]) AS failure (lane, id, error)
         WHERE outbox_held.lane = failure.lane
           AND outbox_held.id = failure.id
        """,
        *_keys(events),
        [errors[event.id] for event in events],
        base_seconds,
    )


async def read_gauges(connection: Connection) -> None:
    """Set the gauges of the outbox, at a cost that does not grow with it.

    At most COUNT_LIMIT pending events are counted, an equal share in each lane, and at most COUNT_LIMIT held
    events.
    """
    (row,) = await connection.fetch(
        """
        SELECT pending, retrying, oldest_seconds
          FROM (SELECT count(*) AS pending,
                       greatest(0, extract(epoch FROM now() - min(created_at)))::float8 AS oldest_seconds
                  FROM unnest($1::smallint[]) AS lane
                 CROSS JOIN LATERAL (SELECT created_at
                                       FROM outbox
                                      WHERE outbox.lane = lane.lane
                                      ORDER BY id
                                      LIMIT $2 / cardinality($1)) AS head) AS pending,
               (SELECT count(*) FILTER (WHERE attempts > 0) AS retrying
                  FROM (SELECT attempts
                          FROM outbox_held
                         LIMIT $2) AS head) AS held
        """,
        list(range(LANES)),
        metrics.COUNT_LIMIT,
    )
    metrics.outbox_pending.set(row["pending"])
    metrics.outbox_retrying.set(row["retrying"])
    metrics.outbox_oldest_age.set(row["oldest_seconds"])


def _keys(events: Sequence[OutboxRow]) -> tuple[list[int], list[int]]:
    return [event.lane for event in events], [event.id for event in events]
