"""What operators do to the outbox: look at it, put an event aside or back, replay."""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal
from uuid import UUID

import msgspec

from service.identifiers import parse_uuid, uuid_of
from service.outbox.events import event_id
from service.postgres.pool import Connection

State = Literal["pending", "failing", "waiting", "parked"]

_BY_OPERATOR = "parked by an operator"


class EventKey(msgspec.Struct, frozen=True, order=True):
    """What an event id is derived from."""

    request_id: UUID
    type: str
    sequence: int

    @classmethod
    def parse(cls, text: str) -> "EventKey | None":
        """Read an event id; None when it is not the id of any event of ours."""
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


class Backlog(msgspec.Struct, frozen=True):
    """How many events of one lane, type and state there are, and the age of the oldest."""

    lane: int
    type: str
    state: State
    events: int
    oldest_seconds: float


class UndeliveredEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event that has not left for RabbitMQ, and why."""

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
    """A row of the outbox, made again; its trace is not: the row of the request does not keep it."""

    lane: int
    request_id: UUID
    type: str
    sequence: int
    payload: bytes


async def read_backlog(connection: Connection) -> list[Backlog]:
    """Return the sizes and ages of all that has not left for RabbitMQ."""
    rows = await connection.fetch(
        """
        SELECT lane, type, state, count(*) AS events,
               extract(epoch FROM now() - min(created_at))::float8 AS oldest_seconds
          FROM undelivered_event
         GROUP BY lane, type, state
         ORDER BY lane, type, state
        """
    )
    return [Backlog(**row) for row in rows]


async def read_held(connection: Connection, *, limit: int) -> list[UndeliveredEvent]:
    """Return the oldest events that are held or parked."""
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
    return [_undelivered(**row) for row in rows]


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
    return [_undelivered(**row) for row in rows]


async def read_of_request(connection: Connection, request_id: UUID) -> list[UndeliveredEvent]:
    """Return the events of one request that have not left for RabbitMQ, in order."""
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
    return [_undelivered(**row) for row in rows]


def _undelivered(
    *,
    lane: int,
    request_id: UUID,
    type: str,  # noqa: A002 - the name of the column
    sequence: int,
    state: State,
    attempts: int,
    last_error: str | None,
    created_at: datetime,
    next_attempt_at: datetime | None,
    parked_at: datetime | None,
) -> UndeliveredEvent:
    return UndeliveredEvent(
        event_id=EventKey(request_id, type, sequence).event_id,
        type=type,
        uuid=uuid_of(request_id),
        sequence=sequence,
        lane=lane,
        state=state,
        attempts=attempts,
        last_error=last_error,
        created_at=created_at,
        # A time for the next attempt means nothing to an event that none will be made of.
        next_attempt_at=next_attempt_at if state == "failing" else None,
        parked_at=parked_at,
    )


async def lanes_of(connection: Connection, keys: Sequence[EventKey]) -> list[int]:
    """Return the lanes in which any of these events is. An event never changes its lane."""
    rows = await connection.fetch(
        """
        SELECT DISTINCT lane
          FROM undelivered_event
         WHERE request_id = ANY($1)
         ORDER BY lane
        """,
        [key.request_id for key in keys],
    )
    return [row["lane"] for row in rows]


async def lanes_with_parked(connection: Connection) -> list[int]:
    """Return the lanes in which any event is parked."""
    rows = await connection.fetch(
        """
        SELECT DISTINCT lane
          FROM outbox_held
         WHERE parked_at IS NOT NULL
         ORDER BY lane
        """
    )
    return [row["lane"] for row in rows]


async def retry(connection: Connection, lane: int, keys: Sequence[EventKey]) -> list[EventKey]:
    """Make held events of a locked lane due now, parked or not, attempts kept. Returns those found.

    One that is not the first of its request waits for its turn.
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
        RETURNING outbox_held.request_id, outbox_held.type, outbox_held.sequence
        """,
        lane,
        *_columns(keys),
    )
    return [EventKey(**row) for row in rows]


async def retry_parked(connection: Connection, lane: int) -> list[EventKey]:
    """Make every parked event of a locked lane due now, as `retry` does. Returns them."""
    rows = await connection.fetch(
        """
        SELECT request_id, type, sequence
          FROM outbox_held
         WHERE lane = $1
           AND parked_at IS NOT NULL
        """,
        lane,
    )
    return await retry(connection, lane, [EventKey(**row) for row in rows])


async def park_held(connection: Connection, lane: int, key: EventKey) -> bool:
    """Park a held event of a locked lane; one that is parked stays so. False when it is not held."""
    parked = await connection.execute(
        """
        UPDATE outbox_held
           SET parked_at = coalesce(parked_at, clock_timestamp()),
               last_error = coalesce(last_error, $5)
         WHERE lane = $1
           AND request_id = $2
           AND type = $3
           AND sequence = $4
        """,
        lane,
        key.request_id,
        key.type,
        key.sequence,
        _BY_OPERATOR,
    )
    return parked != "UPDATE 0"


async def park_pending(connection: Connection, lane: int, key: EventKey) -> bool:
    """Move a pending event of a locked lane to the parked ones. False when it is not pending."""
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
    """Return those of the requests of which any event has not left for RabbitMQ."""
    rows = await connection.fetch(
        """
        SELECT request_id
          FROM undelivered_event
         WHERE request_id = ANY($1)
        """,
        request_ids,
    )
    return {row["request_id"] for row in rows}


async def append_replayed(connection: Connection, events: Sequence[EventToReplay]) -> None:
    """Write events to the outbox again, in the order given; their requests are locked."""
    await connection.execute(
        """
        INSERT INTO outbox (lane, request_id, type, sequence, payload)
        SELECT lane, request_id, type, sequence, payload
          FROM unnest($1::smallint[], $2::uuid[], $3::text[], $4::integer[], $5::bytea[])
               WITH ORDINALITY AS event (lane, request_id, type, sequence, payload, position)
         ORDER BY position
        """,
        [event.lane for event in events],
        [event.request_id for event in events],
        [event.type for event in events],
        [event.sequence for event in events],
        [event.payload for event in events],
    )


def _columns(keys: Sequence[EventKey]) -> tuple[list[UUID], list[str], list[int]]:
    return [key.request_id for key in keys], [key.type for key in keys], [key.sequence for key in keys]
