"""The statements of operator commands on the outbox."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import msgspec

from service.identifiers import parse_uuid, uuid_of
from service.operations.operator_actions import Operator
from service.outbox.events import event_id
from service.postgres.pool import Connection

State = Literal["pending", "failing", "waiting", "parked"]

_BY_OPERATOR = "parked by an operator"


class EventKey(msgspec.Struct, frozen=True, order=True):
    """What identifies an event. Its id is derived from this."""

    request_id: UUID
    type: str
    sequence: int

    @classmethod
    def parse(cls, text: str) -> "EventKey | None":
        """Return the key behind an event id, or None when *text* is not an event id."""
        uuid, _, rest = text.partition(".")
        event_type, _, sequence = rest.rpartition(".")
        request_id = parse_uuid(uuid)
        if request_id is None or not event_type or not (sequence.isascii() and sequence.isdigit()):
            return None
        return cls(request_id, event_type, int(sequence)) if int(sequence) < 2**31 else None

    @property
    def event_id(self) -> str:
        """The id of the event."""
        return event_id(uuid_of(self.request_id), self.type, self.sequence)


class UndeliveredEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event that has not been published, and its last error."""

    event_id: str
    type: str
    uuid: str
    sequence: int
    lane: int
    state: State
    attempts: int
    last_error: str | None
    created_at: datetime
    next_attempt_at: datetime | None
    parked_at: datetime | None


class EventToReplay(msgspec.Struct, frozen=True):
    """A row of the outbox to be written again. It has no trace: the row of the request does not keep it."""

    lane: int
    request_id: UUID
    type: str
    sequence: int
    payload: bytes


async def read_held(connection: Connection, *, limit: int) -> list[UndeliveredEvent]:
    """Return the oldest held events, parked ones included."""
    rows = await connection.fetch(
        """
        SELECT lane, request_id, type, sequence, state, attempts, last_error, created_at,
               next_attempt_at, parked_at
          FROM undelivered_event
         WHERE state <> 'pending'
         ORDER BY id
         LIMIT $1
        """,
        limit,
    )
    return [_undelivered(row) for row in rows]


async def read_heads(connection: Connection, lanes: int, *, limit: int) -> list[UndeliveredEvent]:
    """Return the oldest pending events of all lanes."""
    rows = await connection.fetch(
        """
        SELECT lane, request_id, type, sequence, state, attempts, last_error, created_at,
               next_attempt_at, parked_at
          FROM generate_series(0, $1 - 1) AS number
         CROSS JOIN LATERAL (SELECT *
                               FROM undelivered_event
                              WHERE lane = number
                                AND state = 'pending'
                              ORDER BY id
                              LIMIT $2) AS head
         ORDER BY id
         LIMIT $2
        """,
        lanes,
        limit,
    )
    return [_undelivered(row) for row in rows]


async def read_of_request(connection: Connection, request_id: UUID) -> list[UndeliveredEvent]:
    """Return the unpublished events of one request, in order."""
    rows = await connection.fetch(
        """
        SELECT lane, request_id, type, sequence, state, attempts, last_error, created_at,
               next_attempt_at, parked_at
          FROM undelivered_event
         WHERE request_id = $1
         ORDER BY id
        """,
        request_id,
    )
    return [_undelivered(row) for row in rows]


def _undelivered(row: Mapping[str, Any]) -> UndeliveredEvent:
    return UndeliveredEvent(
        event_id=EventKey(row["request_id"], row["type"], row["sequence"]).event_id,
        type=row["type"],
        uuid=uuid_of(row["request_id"]),
        sequence=row["sequence"],
        lane=row["lane"],
        state=row["state"],
        attempts=row["attempts"],
        last_error=row["last_error"],
        created_at=row["created_at"],
        # Only a failing event is due by itself. The others wait for another event or an operator.
        next_attempt_at=row["next_attempt_at"] if row["state"] == "failing" else None,
        parked_at=row["parked_at"],
    )


async def read_parked(connection: Connection) -> list[EventKey]:
    """Return the keys of all parked events."""
    rows = await connection.fetch(
        """
        SELECT request_id, type, sequence
          FROM outbox_held
         WHERE parked_at IS NOT NULL
        """
    )
    return [EventKey(**row) for row in rows]


async def by_lane(connection: Connection, keys: Sequence[EventKey]) -> dict[int, list[EventKey]]:
    """Return the events by the lane of their request, if it has unpublished ones. A lane never changes."""
    rows = await connection.fetch(
        """
        SELECT DISTINCT lane, request_id
          FROM undelivered_event
         WHERE request_id = ANY($1)
         ORDER BY lane
        """,
        [key.request_id for key in keys],
    )
    found: dict[int, list[EventKey]] = {}
    for lane, request_id in rows:
        found.setdefault(lane, []).extend(key for key in keys if key.request_id == request_id)
    return found


async def read_states(connection: Connection, keys: Sequence[EventKey]) -> dict[EventKey, State]:
    """Return the states of those events that are unpublished."""
    rows = await connection.fetch(
        """
        SELECT request_id, type, sequence, state
          FROM undelivered_event
         WHERE request_id = ANY($1)
        """,
        [key.request_id for key in keys],
    )
    return {EventKey(*row[:-1]): row["state"] for row in rows}


async def retry(connection: Connection, lane: int, keys: Sequence[EventKey]) -> list[EventKey]:
    """Make held events of a locked lane due now, parked ones included. Returns those that were not.

    Their attempts are kept. An event that is not the first of its request still waits for its turn.
    """
    rows = await connection.fetch(
        """
        WITH first AS (
            SELECT request_id, min(id) AS id
              FROM undelivered_event
             WHERE lane = $1
             GROUP BY request_id
        )
        UPDATE outbox_held
           SET next_attempt_at = CASE WHEN outbox_held.id = first.id
                                      THEN clock_timestamp()
                                      ELSE 'infinity' END,
               parked_at = NULL
          FROM unnest($2::uuid[], $3::text[], $4::integer[]) AS wanted (request_id, type, sequence)
          JOIN first
         USING (request_id)
         WHERE lane = $1
           AND outbox_held.request_id = wanted.request_id
           AND outbox_held.type = wanted.type
           AND outbox_held.sequence = wanted.sequence
           AND (parked_at IS NOT NULL OR outbox_held.id = first.id AND next_attempt_at > clock_timestamp())
        RETURNING outbox_held.request_id, outbox_held.type, outbox_held.sequence
        """,
        lane,
        *_as_columns(keys),
    )
    return [EventKey(**row) for row in rows]


async def park(connection: Connection, lane: int, keys: Sequence[EventKey]) -> list[EventKey]:
    """Park events of a locked lane. Returns those that were not parked."""
    return [
        key
        for key in keys
        if await _park_held(connection, lane, key) or await _park_pending(connection, lane, key)
    ]


async def _park_held(connection: Connection, lane: int, key: EventKey) -> bool:
    """Park a held event of a locked lane. False when it is not held, or is parked already."""
    parked = await connection.execute(
        """
        UPDATE outbox_held
           SET parked_at = clock_timestamp(),
               last_error = coalesce(last_error, $5)
         WHERE lane = $1
           AND request_id = $2
           AND type = $3
           AND sequence = $4
           AND parked_at IS NULL
        """,
        lane,
        key.request_id,
        key.type,
        key.sequence,
        _BY_OPERATOR,
    )
    return parked != "UPDATE 0"


async def _park_pending(connection: Connection, lane: int, key: EventKey) -> bool:
    """Park a pending event of a locked lane. False when it is not pending."""
    moved = await connection.execute(
        """
        WITH moved AS (
            DELETE FROM outbox
             WHERE lane = $1
               AND request_id = $2
               AND type = $3
               AND sequence = $4
            RETURNING lane, id, request_id, type, sequence, traceparent, payload, created_at
        )
        INSERT INTO outbox_held (lane, id, request_id, type, sequence, traceparent, payload, created_at,
                                 attempts, next_attempt_at, last_error, parked_at)
        SELECT lane, id, request_id, type, sequence, traceparent, payload, created_at, 0, now(), $5, now()
          FROM moved
        """,
        lane,
        key.request_id,
        key.type,
        key.sequence,
        _BY_OPERATOR,
    )
    return moved != "INSERT 0 0"


async def discard(connection: Connection, lane: int, keys: Sequence[EventKey]) -> list[EventKey]:
    """Delete unpublished events of a locked lane. Returns those found. The later ones of a request follow."""
    rows = await connection.fetch(
        """
        WITH unwanted AS (
            SELECT *
              FROM unnest($2::uuid[], $3::text[], $4::integer[]) AS event (request_id, type, sequence)
        ), pending AS (
            DELETE FROM outbox
             WHERE lane = $1
               AND (request_id, type, sequence) IN (SELECT * FROM unwanted)
            RETURNING request_id, type, sequence
        ), held AS (
            DELETE FROM outbox_held
             WHERE lane = $1
               AND (request_id, type, sequence) IN (SELECT * FROM unwanted)
            RETURNING request_id, type, sequence
        )
        SELECT * FROM pending
        UNION
        SELECT * FROM held
        """,
        lane,
        *_as_columns(keys),
    )
    return [EventKey(**row) for row in rows]


async def has_room(connection: Connection, limit: int) -> bool:
    """Whether fewer than *limit* events are pending."""
    pending: int = await connection.fetchval(
        """
        SELECT count(*)
          FROM (SELECT
                  FROM outbox
                 LIMIT $1) AS counted
        """,
        limit,
    )
    return pending < limit


async def with_undelivered(connection: Connection, request_ids: Sequence[UUID]) -> set[UUID]:
    """Return those of the requests that have unpublished events."""
    rows = await connection.fetch(
        """
        SELECT request_id
          FROM undelivered_event
         WHERE request_id = ANY($1)
        """,
        request_ids,
    )
    return {row["request_id"] for row in rows}


async def append_replayed(
    connection: Connection, events: Sequence[EventToReplay], *, action: str, by: Operator
) -> None:
    """Write events to the outbox again, in this order, and record each. Their requests must be locked."""
    await connection.execute(
        """
        WITH event AS (
            SELECT *
              FROM unnest($1::smallint[], $2::uuid[], $3::text[], $4::integer[], $5::bytea[], $6::text[])
                   WITH ORDINALITY AS event (lane, request_id, type, sequence, payload, event_id, position)
        ), recorded AS (
            INSERT INTO operator_action (request_id, action, subject, operator, reason)
            SELECT request_id, $7, event_id, $8, $9
              FROM event
             ORDER BY position
        )
        INSERT INTO outbox (lane, request_id, type, sequence, payload)
        SELECT lane, request_id, type, sequence, payload
          FROM event
         ORDER BY position
        """,
        [event.lane for event in events],
        [event.request_id for event in events],
        [event.type for event in events],
        [event.sequence for event in events],
        [event.payload for event in events],
        [event_id(uuid_of(event.request_id), event.type, event.sequence) for event in events],
        action,
        by.name,
        by.reason,
    )


def _as_columns(keys: Sequence[EventKey]) -> tuple[list[UUID], list[str], list[int]]:
    return [key.request_id for key in keys], [key.type for key in keys], [key.sequence for key in keys]
