"""`outbox list|replay`: the events that have not been published, with their errors, and publishing again."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import asyncpg
import click

from service.calculation_requests import reading
from service.calculation_requests.changing import change_all
from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, Operator, answering, cell, on_record
from service.outbox import events, waking
from service.postgres.pool import Connection

_BATCH_REQUESTS = 100  # locked by one transaction
EVENTS_PER_SECOND = 200

outbox = click.Group("outbox", help="Show events that have not been published, or replay events.")


@outbox.command("list")
@parameters.limit
@answering
async def list_events(limit: int) -> Answer:
    """Count the unpublished events and show the oldest. Retrying and waiting events come first."""
    async with connecting.postgres() as connection:
        counts = Answer.listing(await _count(connection))
        oldest = Answer.listing(await read(connection, limit=limit))
    return Answer({"counts": counts.data, "events": oldest.data}, f"{counts.text}\n\n{oldest.text}")


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


@outbox.command("replay")
@parameters.since
@click.option("--uuid", "request_id", type=parameters.uuid, help="Only events of this request: req_…")
@on_record
async def replay_events(*, since: parameters.Time | None, request_id: UUID | None, by: Operator) -> Answer:
    """Publish events again with the same ids and bodies, but without their traces."""
    if since is None and request_id is None:
        raise click.UsageError("say which events to replay: --from, or --uuid")
    async with connecting.postgres() as connection:
        if request_id is not None:
            await reading.check_known(connection, request_id)
        since = await parameters.at(connection, since)
        chosen = await connection.fetch(_CHOOSE, since, request_id)
        subject = f"{sum(row['events'] for row in chosen)} events{f' from {cell(since)} on' if since else ''}"
        await operator_actions.record(connection, "outbox replay", [(request_id, subject)], by)
        done = await replay(connection, [row["request_id"] for row in chosen], since)
    left_out = f"{done['requests_undelivered']} requests have unpublished events, and were left out"
    text = f"{done['events']} events of {done['requests']} requests replayed; {left_out}"
    return Answer(done, text, status=int(not done["events"]))


_CHOOSE = """
    SELECT request_id, count(*) AS events
      FROM event
     WHERE ($1::timestamptz IS NULL OR time >= $1)
       AND ($2::uuid IS NULL OR request_id = $2)
     GROUP BY request_id
     ORDER BY request_id
"""


async def replay(connection: Connection, request_ids: Sequence[UUID], since: datetime | None) -> Counter[str]:
    """Queue the events of these requests *since* a time again. Returns how many were queued and left out.

    The requests are locked, so that no new event comes between the replayed events of a request. Of an erased
    request, only request.erased is queued, because its other events have changed since they were published.
    The rate is limited, because new events queue behind replayed events.
    """
    tally = Counter(requests=0, events=0, requests_undelivered=0)
    for start in range(0, len(request_ids), _BATCH_REQUESTS):
        batch = request_ids[start : start + _BATCH_REQUESTS]
        async with connecting.bounded_transaction(connection), change_all(connection, batch) as found:
            queued = await connection.fetch(_QUEUE, batch, since, list(found))
        replayed = {row["request_id"] for row in queued}
        undelivered = found.keys() - replayed
        tally.update(requests=len(replayed), events=len(queued), requests_undelivered=len(undelivered))
        await waking.notify(connection)
        await asyncio.sleep(len(queued) / EVENTS_PER_SECOND)
    return tally


# A request with an unpublished event is skipped: a replay would put earlier events behind that event.
_QUEUE = f"""
    INSERT INTO outbox (request_id, sequence)
    SELECT request_id, sequence
      FROM event
     WHERE request_id = ANY($1)
       AND ($2::timestamptz IS NULL OR time >= $2)
       AND (request_id = ANY($3) OR type = '{events.RequestErased.type}')
       AND NOT EXISTS (SELECT
                         FROM outbox
                        WHERE outbox.request_id = event.request_id)
    ON CONFLICT DO NOTHING -- Another replay may queue request.erased, which no lock prevents.
    RETURNING request_id
"""  # noqa: S608 - constants only
