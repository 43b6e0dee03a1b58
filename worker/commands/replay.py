"""`outbox replay`: queues kept events again."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import click

from service.calculation_requests import reading
from service.calculation_requests.changing import change_all
from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, Operator, cell, on_record
from service.outbox import events, waking
from service.postgres.pool import Connection

_BATCH_REQUESTS = 100  # locked by one transaction
EVENTS_PER_SECOND = 200


@click.command("replay")
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
