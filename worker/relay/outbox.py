"""The statements of the relay."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from service.identifiers import uuid_of
from service.outbox.events import RequestCreated, event_id
from service.outbox.writing import LANES
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection

_LANE_LOCKS = 0x0B0C  # the class of our advisory locks; the lane is the second key


class LaneLost(Exception):
    """Rows of a lane were gone when they were to be settled: another relay has had the lane."""


class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """An event on its way."""

    lane: int
    id: int
    request_id: UUID
    type: str
    sequence: int
    traceparent: str | None
    payload: bytes
    created_at: datetime
    attempts: int
    held: bool

    @property
    def is_created(self) -> bool:
        """Whether it is the event that the customer's e-mail comes of."""
        return self.type == RequestCreated.type

    @property
    def event_id(self) -> str:
        """The id of the event, which is the AMQP message id too."""
        return event_id(uuid_of(self.request_id), self.type, self.sequence)


class Snapshot(msgspec.Struct, frozen=True):
    """What a statement could see: transactions below xmin had ended, and none from next_xid on had begun.

    A snapshot's own xmax says less: it is one past the last that has ended, and above it some may be open.
    """

    xmin: int
    next_xid: int


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How many events have not left for RabbitMQ, by state, and the age of the oldest pending one."""

    pending: int
    failing: int
    waiting: int
    parked: int
    oldest_seconds: float


class Locked(msgspec.Struct, frozen=True):
    """The lanes that were free and are taken, and when that was."""

    lanes: list[int]
    snapshot: Snapshot


class Due(msgspec.Struct, frozen=True):
    """The lanes with something to publish, when that was, and the last id that had been given out."""

    lanes: list[int]  # with events that have not been held
    held_lanes: list[int]  # with events that are to be tried again
    snapshot: Snapshot
    last_id: int


async def find_due(connection: Connection, marks: Sequence[int]) -> Due:
    """Return the lanes in which something can be published now; *marks* are their low-water marks."""
    (row,) = await connection.fetch(
        """
        WITH look AS MATERIALIZED (
            SELECT (number - 1)::smallint AS lane,
                   EXISTS (SELECT
                             FROM outbox
                            WHERE outbox.lane = (number - 1)::smallint
                              AND outbox.id >= low_water) AS has_fresh,
                   EXISTS (SELECT
                             FROM outbox_held
                            WHERE outbox_held.lane = (number - 1)::smallint
                              AND parked_at IS NULL
                              AND next_attempt_at <= now()) AS has_held
              FROM unnest($1::bigint[]) WITH ORDINALITY AS mark (low_water, number)
        )
        SELECT ARRAY (SELECT lane
                        FROM look
                       WHERE has_fresh) AS lanes,
               ARRAY (SELECT lane
                        FROM look
                       WHERE has_held) AS held_lanes,
               pg_snapshot_xmin(snapshot)::text::bigint AS xmin,
               pg_snapshot_xmax(snapshot)::text::bigint + age(pg_snapshot_xmax(snapshot)::xid) AS next_xid,
               CASE WHEN sequence.is_called THEN sequence.last_value ELSE 0 END AS last_id
          FROM pg_current_snapshot() AS snapshot,
               outbox_id_seq AS sequence
        """,
        marks,
    )
    return Due(row["lanes"], row["held_lanes"], Snapshot(row["xmin"], row["next_xid"]), row["last_id"])


async def find_passed(connection: Connection, marks: Sequence[int]) -> list[int]:
    """Return the lanes with an event before their low-water mark, where none should be."""
    rows = await connection.fetch(
        """
        SELECT (number - 1)::smallint AS lane
          FROM unnest($1::bigint[]) WITH ORDINALITY AS mark (low_water, number)
         WHERE EXISTS (SELECT
                         FROM outbox
                        WHERE outbox.lane = number - 1
                          AND outbox.id < low_water)
        """,
        marks,
    )
    return [row["lane"] for row in rows]


async def lock_lanes(connection: Connection, lanes: Sequence[int]) -> Locked:
    """Take those of *lanes* that no other relay has, until the transaction ends.

    A statement of its own: the next one then sees all that the last holders have settled.

    Raises PostgresUnavailable on a server that takes no writes: it grants locks, and would settle nothing.
    """
    (row,) = await connection.fetch(
        """
        SELECT ARRAY (SELECT lane
                        FROM unnest($2::smallint[]) AS lane
                       WHERE pg_try_advisory_xact_lock($1, lane)) AS lanes,
               current_setting('transaction_read_only')::boolean AS is_read_only,
               pg_snapshot_xmin(snapshot)::text::bigint AS xmin,
               pg_snapshot_xmax(snapshot)::text::bigint + age(pg_snapshot_xmax(snapshot)::xid) AS next_xid
          FROM pg_current_snapshot() AS snapshot
        """,
        _LANE_LOCKS,
        lanes,
    )
    if row["is_read_only"]:
        raise PostgresUnavailable.counted()
    return Locked(row["lanes"], Snapshot(row["xmin"], row["next_xid"]))


async def read(
    connection: Connection, lanes: Sequence[int], *, low_water: Sequence[int], limit: int
) -> list[OutboxRow]:
    """Return the oldest events of locked lanes, at most *limit* of each, read from their marks on.

    `held` says that an earlier event of the request is held.
    """
    rows = await connection.fetch(
        """
        SELECT event.lane, id, request_id, type, sequence, traceparent, payload, created_at, 0 AS attempts,
               EXISTS (SELECT
                         FROM outbox_held
                        WHERE outbox_held.request_id = event.request_id) AS held
          FROM unnest($1::smallint[], $2::bigint[]) AS mark (lane, low_water),
               LATERAL (SELECT *
                          FROM outbox
                         WHERE outbox.lane = mark.lane
                           AND outbox.id >= mark.low_water
                         ORDER BY outbox.id
                         LIMIT $3) AS event
        """,
        lanes,
        low_water,
        limit,
    )
    return [OutboxRow(**row) for row in rows]


async def read_held(connection: Connection, lanes: Sequence[int], *, limit: int) -> list[OutboxRow]:
    """Return held events of locked lanes that are due and have none of their request before them.

    Of each lane at most *limit* request.created and as many others. First those that were not refused
    themselves, then those that have waited longest.
    """
    rows = await connection.fetch(
        """
        SELECT event.lane, id, request_id, type, sequence, traceparent, payload, created_at, attempts,
               true AS held
          FROM unnest($1::smallint[]) AS lane
         CROSS JOIN (VALUES (true), (false)) AS kind (is_created)
         CROSS JOIN LATERAL (SELECT *
                               FROM outbox_held AS candidate
                              WHERE candidate.lane = lane.lane
                                AND (candidate.type = 'request.created') = kind.is_created
                                AND parked_at IS NULL
                                AND next_attempt_at <= now()
                                AND NOT EXISTS (SELECT
                                                  FROM outbox_held AS earlier
                                                 WHERE earlier.request_id = candidate.request_id
                                                   AND earlier.id < candidate.id)
                              ORDER BY next_attempt_at
                              LIMIT $2) AS event
         ORDER BY next_attempt_at
        """,
        lanes,
        limit,
    )
    return [OutboxRow(**row) for row in rows]


async def delete(connection: Connection, events: Sequence[OutboxRow]) -> None:
    """Settle events that the broker has confirmed. Raises LaneLost unless every one was there."""
    if not events:
        return
    deleted = await connection.execute(
        """
        DELETE FROM outbox
         USING unnest($1::smallint[], $2::bigint[]) AS confirmed (lane, id)
         WHERE outbox.lane = confirmed.lane
           AND outbox.id = confirmed.id
        """,
        *_keys(events),
    )
    if deleted != f"DELETE {len(events)}":
        raise LaneLost


async def delete_held(connection: Connection, events: Sequence[OutboxRow]) -> None:
    """Settle held events that the broker has confirmed. Raises LaneLost unless every one was there."""
    if not events:
        return
    deleted = await connection.execute(
        """
        DELETE FROM outbox_held
         USING unnest($1::smallint[], $2::bigint[]) AS confirmed (lane, id)
         WHERE outbox_held.lane = confirmed.lane
           AND outbox_held.id = confirmed.id
        """,
        *_keys(events),
    )
    if deleted != f"DELETE {len(events)}":
        raise LaneLost


async def hold(connection: Connection, events: Sequence[OutboxRow]) -> None:
    """Move events out of their lanes; each waits for the earlier ones of its request.

    A trigger lets them wait. Another wakes the next when one is settled: due before all that were refused.
    """
    if not events:
        return
    await connection.execute(
        """
        WITH moved AS (
            DELETE FROM outbox
             USING unnest($1::smallint[], $2::bigint[]) AS refused (lane, id)
             WHERE outbox.lane = refused.lane
               AND outbox.id = refused.id
            RETURNING outbox.lane, outbox.id, request_id, type, sequence, traceparent, payload, created_at
        )
        INSERT INTO outbox_held (lane, id, request_id, type, sequence, traceparent, payload, created_at,
                                 attempts, next_attempt_at)
        SELECT lane, id, request_id, type, sequence, traceparent, payload, created_at, 0, '-infinity'
          FROM moved
         ORDER BY id
        """,
        *_keys(events),
    )


async def postpone(
    connection: Connection,
    events: Sequence[OutboxRow],
    errors: Sequence[str],
    *,
    base_seconds: float,
    longest_seconds: float,
) -> None:
    """Charge held events one attempt: due again after a delay that doubles."""
    if not events:
        return
    await connection.execute(
        """
        UPDATE outbox_held
           SET attempts = attempts + 1,
               last_error = failure.error,
               next_attempt_at = clock_timestamp()  -- the transaction has been open for a whole publish
                                 + make_interval(secs => least($5, $4 * 2 ^ least(attempts, 30)))
          FROM unnest($1::smallint[], $2::bigint[], $3::text[]) AS failure (lane, id, error)
         WHERE outbox_held.lane = failure.lane
           AND outbox_held.id = failure.id
        """,
        *_keys(events),
        errors,
        base_seconds,
        longest_seconds,
    )


async def make_refused_due(connection: Connection, kinds: Sequence[bool], *, limit: int) -> int:
    """End the wait of refused events, of request.created (true) or of the others. Returns their number.

    Of each lane at most *limit* of a kind, in whatever relay has the lane; those that it settles are skipped.
    """
    woken = await connection.execute(
        """
        WITH late AS (
            SELECT lane, id
              FROM generate_series(0, $1 - 1) AS number
             CROSS JOIN unnest($2::boolean[]) AS kind (is_created)
             CROSS JOIN LATERAL (SELECT lane, id
                                   FROM outbox_held
                                  WHERE lane = number::smallint
                                    AND (type = 'request.created') = is_created
                                    AND parked_at IS NULL
                                    AND next_attempt_at > now()
                                    AND next_attempt_at < 'infinity'
                                  ORDER BY next_attempt_at
                                  LIMIT $3
                                    FOR UPDATE SKIP LOCKED) AS refused
        )
        UPDATE outbox_held
           SET next_attempt_at = clock_timestamp()
          FROM late
         WHERE outbox_held.lane = late.lane
           AND outbox_held.id = late.id
        """,
        LANES,
        kinds,
        limit,
    )
    return int(woken.removeprefix("UPDATE "))


async def park(connection: Connection, events: Sequence[OutboxRow], errors: Sequence[str]) -> None:
    """Charge held events one attempt, and try them no more until an operator says so."""
    if not events:
        return
    await connection.execute(
        """
        UPDATE outbox_held
           SET attempts = attempts + 1,
               last_error = failure.error,
               parked_at = clock_timestamp()
          FROM unnest($1::smallint[], $2::bigint[], $3::text[]) AS failure (lane, id, error)
         WHERE outbox_held.lane = failure.lane
           AND outbox_held.id = failure.id
        """,
        *_keys(events),
        errors,
    )


def _keys(events: Sequence[OutboxRow]) -> tuple[list[int], list[int]]:
    return [event.lane for event in events], [event.id for event in events]


async def read_sizes(connection: Connection, marks: Sequence[int], *, exact_limit: int) -> Sizes:
    """Return how much there is, at a cost that does not grow with it.

    Up to *exact_limit* pending, and as many held, are counted; beyond that it is what Postgres's own
    statistics of live rows say. Dead rows cost nothing below *marks*, the low-water marks of the lanes.
    """
    (row,) = await connection.fetch(
        """
        WITH pending AS (
            SELECT sum(head.counted) AS counted,
                   bool_or(head.counted = $2 / cardinality($1::bigint[])) AS is_cut_off,
                   greatest(0, extract(epoch FROM now() - min(head.oldest)))::float8 AS oldest_seconds
              FROM unnest($1::bigint[]) WITH ORDINALITY AS mark (low_water, number)
             CROSS JOIN LATERAL (SELECT count(*) AS counted, min(created_at) AS oldest
                                   FROM (SELECT created_at
                                           FROM outbox
                                          WHERE lane = (number - 1)::smallint
                                            AND id >= low_water
                                          ORDER BY id
                                          LIMIT $2 / cardinality($1::bigint[])) AS read) AS head
        ), held AS (
            SELECT count(*) AS counted,
                   count(*) FILTER (WHERE parked_at IS NULL AND attempts > 0) AS failing,
                   count(*) FILTER (WHERE parked_at IS NULL AND attempts = 0) AS waiting,
                   count(*) FILTER (WHERE parked_at IS NOT NULL) AS parked
              FROM (SELECT attempts, parked_at
                      FROM outbox_held
                     LIMIT $2) AS read
        ), scaled AS (
            SELECT *,
                   CASE WHEN counted = $2
                        THEN greatest(1, pg_stat_get_live_tuples('outbox_held'::regclass)::float8 / $2)
                        ELSE 1 END AS factor
              FROM held
        )
        SELECT CASE WHEN is_cut_off
                    THEN greatest(pending.counted, pg_stat_get_live_tuples('outbox'::regclass))
                    ELSE pending.counted END::bigint AS pending,
               (failing * factor)::bigint AS failing,
               (waiting * factor)::bigint AS waiting,
               (parked * factor)::bigint AS parked,
               oldest_seconds
          FROM pending, scaled
        """,
        marks,
        exact_limit,
    )
    return Sizes(**row)
