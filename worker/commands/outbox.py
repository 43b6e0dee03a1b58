"""`outbox list`: the number of events that have not been published, the oldest events, and their errors."""

from uuid import UUID

import asyncpg
import click

from service.command_line import connecting, parameters
from service.command_line.answering import Answer, answering
from service.postgres.pool import Connection
from worker.commands import replay

outbox = click.Group("outbox", help="Show events that have not been published, or replay events.")
outbox.add_command(replay.replay_events)


@outbox.command("list")
@parameters.limit
@answering
async def list_events(limit: int) -> Answer:
    """Count the unpublished events and show the oldest. Retrying and waiting events come first."""
    async with connecting.postgres() as connection:
        counts = Answer.listing(await _count(connection))
        events = Answer.listing(await read(connection, limit=limit))
    return Answer({"counts": counts.data, "events": events.data}, f"{counts.text}\n\n{events.text}")


async def _count(connection: Connection) -> list[asyncpg.Record]:
    return await connection.fetch(
        f"""
        SELECT {_STATE} AS state, type, count(*) AS events,
               extract(epoch FROM now() - min(created_at))::float8 AS oldest_seconds
          FROM outbox
          JOIN event USING (request_id, sequence)
         GROUP BY 1, 2
         ORDER BY 1, 2
        """  # noqa: S608 - constants only
    )


# Waiting: an earlier event of the request has failed.
_STATE = """CASE WHEN outbox.request_id IS NULL THEN 'published'
                     WHEN next_attempt_at IS NULL THEN 'pending'
                     WHEN attempts > 0 THEN 'retrying'
                     ELSE 'waiting' END"""


async def read(
    connection: Connection, *, request_id: UUID | None = None, limit: int | None = None
) -> list[asyncpg.Record]:
    """Return a request's events or, without one, the oldest unpublished ones, the pending ones last."""
    return await connection.fetch(
        f"""
        SELECT request_id AS uuid, type, sequence, {_STATE} AS state, time AS written_at,
               coalesce(attempts, 0) AS attempts, last_error,
               CASE WHEN attempts > 0 THEN next_attempt_at END AS next_attempt_at
          FROM event
          {"JOIN" if request_id is None else "LEFT JOIN"} outbox USING (request_id, sequence)
         WHERE $1::uuid IS NULL OR request_id = $1
         ORDER BY {"next_attempt_at IS NULL, created_at," if request_id is None else ""} request_id, sequence
         LIMIT $2
        """,  # noqa: S608 - constants only
        request_id,
        limit,
    )
