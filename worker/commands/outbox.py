"""`outbox list`: the number of events that have not been published, the oldest events, and their errors."""

from datetime import datetime
from typing import Literal
from uuid import UUID

import click
import msgspec

from service.command_line import connecting, parameters
from service.command_line.answering import Answer, answering
from service.identifiers import uuid_of
from service.outbox.events import event_id
from service.postgres.pool import Connection
from worker.commands import replay

EventState = Literal["pending", "retrying", "waiting", "published"]


class Backlog(msgspec.Struct, frozen=True):
    """How many events of one state and type there are, and the age of the oldest."""

    state: EventState
    type: str
    events: int
    oldest_seconds: float


class Event(msgspec.Struct, frozen=True):
    """An event and its last error. Only a retrying event has a time for its next attempt."""

    event_id: str
    type: str
    sequence: int
    state: EventState
    written_at: datetime
    attempts: int = 0
    last_error: str | None = None
    next_attempt_at: datetime | None = None


@click.command("list")
@parameters.limit
@answering
async def list_events(limit: int) -> Answer:
    """Count the unpublished events and show the oldest. Retrying and waiting events come first."""
    async with connecting.postgres() as connection:
        counts = await _count(connection)
        events = await read(connection, limit=limit)
    text = f"{Answer.listing(counts).text}\n\n{Answer.listing(events).text}"
    return Answer({"counts": counts, "events": events}, text)


outbox = click.Group(
    "outbox",
    help="Show events that have not been published, or replay events.",
    commands=[list_events, replay.replay_events],
)


async def _count(connection: Connection) -> list[Backlog]:
    rows = await connection.fetch(
        f"""
        SELECT {_STATE} AS state, type, count(*) AS events,
               extract(epoch FROM now() - min(created_at))::float8 AS oldest_seconds
          FROM outbox
          JOIN event USING (request_id, sequence)
         GROUP BY 1, 2
         ORDER BY 1, 2
        """  # noqa: S608 - constants only
    )
    return [Backlog(**row) for row in rows]


# Waiting: an earlier event of the request has failed.
_STATE = """CASE WHEN outbox.request_id IS NULL THEN 'published'
                     WHEN next_attempt_at IS NULL THEN 'pending'
                     WHEN attempts > 0 THEN 'retrying'
                     ELSE 'waiting' END"""


async def read(
    connection: Connection, *, request_id: UUID | None = None, limit: int | None = None
) -> list[Event]:
    """Return all events of a request, which may have been erased; without one, the oldest unpublished events.

    Pending events come last.
    """
    rows = await connection.fetch(
        f"""
        SELECT request_id, type, sequence, {_STATE} AS state, time, coalesce(attempts, 0), last_error,
               CASE WHEN attempts > 0 THEN next_attempt_at END
          FROM event
          {"JOIN" if request_id is None else "LEFT JOIN"} outbox USING (request_id, sequence)
         WHERE $1::uuid IS NULL OR request_id = $1
         ORDER BY {"next_attempt_at IS NULL, created_at," if request_id is None else ""} request_id, sequence
         LIMIT $2
        """,  # noqa: S608 - constants only
        request_id,
        limit,
    )
    return [Event(event_id(uuid_of(row[0]), row["type"], row["sequence"]), *row[1:]) for row in rows]
