"""`outbox replay`: writes events to the outbox again, rebuilt from the rows of their requests."""

import asyncio
from collections.abc import Mapping, Sequence
from uuid import UUID

import click
import msgspec

from service.calculation_requests import event_history
from service.calculation_requests.changing import change_all
from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, Operator, answering, cell, on_record
from service.outbox import events, lanes
from service.postgres.pool import Connection

_BATCH_REQUESTS = 100  # locked by one transaction
EVENTS_PER_SECOND = 200

Chosen = Mapping[UUID, Sequence[int]]  # the sequence numbers of the events to replay, by request


class Tally(msgspec.Struct):
    """How many events were replayed."""

    requests: int = 0
    events: int = 0
    requests_undelivered: int = 0  # requests that were skipped, because they have unpublished events


@click.command("replay")
@click.option(
    "--from", "since", type=parameters.time, metavar="TIME", help="ISO 8601, or 2h for two hours ago."
)
@click.option("--uuid", "request_id", type=parameters.uuid, help="Only events of this request: req_…")
@answering
@on_record
async def replay_events(*, since: parameters.Time | None, request_id: UUID | None, by: Operator) -> Answer:
    """Publish events again with the same ids and bodies, but without their traces."""
    if since is None and request_id is None:
        raise click.UsageError("say which events to replay: --from, or --uuid")
    async with connecting.postgres() as connection:
        if request_id is not None:
            await event_history.read_internally(connection, request_id)  # Raises RequestNotFound.
        since = await parameters.at(connection, since)
        chosen = dict(await connection.fetch(_CHOOSE, since, request_id))
        subject = f"{sum(map(len, chosen.values()))} events from {cell(since)} on"
        await operator_actions.record(connection, "outbox replay", [(request_id, subject)], by)
        done = await replay(connection, chosen)
    left_out = f"{done.requests_undelivered} left out, because they have unpublished events"
    return Answer(done, f"{done.events} events of {done.requests} requests replayed, {left_out}")


# Events of erased requests are left out, because they cannot be rebuilt.
_CHOOSE = """
    SELECT request_id, array_agg(sequence ORDER BY sequence)
      FROM (SELECT id AS request_id, 1 AS sequence, created_at AS at
              FROM calculation_request
             UNION ALL
            SELECT request_id, recorded.sequence, at
              FROM recorded_event AS recorded
              JOIN calculation_request AS request
                ON request.id = request_id) AS event
     WHERE ($1::timestamptz IS NULL OR at >= $1)
       AND ($2::uuid IS NULL OR request_id = $2)
     GROUP BY request_id
     ORDER BY request_id
"""


async def replay(connection: Connection, chosen: Chosen) -> Tally:
    """Write the chosen events again. The rate is limited, because new events queue behind replayed events.

    A request with an unpublished event is skipped: a replay would put earlier events behind that event.
    """
    tally = Tally()
    request_ids = list(chosen)
    for start in range(0, len(request_ids), _BATCH_REQUESTS):
        batch = {each: chosen[each] for each in request_ids[start : start + _BATCH_REQUESTS]}
        written = await replay_batch(connection, batch, tally)
        await lanes.notify(connection)
        await asyncio.sleep(written / EVENTS_PER_SECOND)
    return tally


async def replay_batch(connection: Connection, chosen: Chosen, tally: Tally) -> int:
    """Write the chosen events of some requests again. Count them in *tally*, and return their number.

    The requests are locked, so that no new event comes between the replayed events of a request. Requests
    that have been erased in the meantime are skipped.
    """
    rows: list[tuple[int, UUID, str, int, bytes]] = []
    async with connecting.bounded_transaction(connection), change_all(connection, list(chosen)):
        unpublished = await connection.fetch(
            "SELECT request_id FROM undelivered_event WHERE request_id = ANY($1)", list(chosen)
        )
        undelivered = {row["request_id"] for row in unpublished}
        replayed = [each for each in chosen if each not in undelivered]
        for history in await event_history.read(connection, replayed):
            tally.requests += 1
            request_id = history.request.id
            for recorded in history.recorded_events:
                if recorded.sequence in chosen[request_id]:
                    payload = events.encode(history.rebuild(recorded), time=recorded.at, traceparent=None)
                    lane = lanes.lane_of(request_id)
                    rows.append((lane, request_id, recorded.type, recorded.sequence, payload))
        await connection.executemany(
            "INSERT INTO outbox (lane, request_id, type, sequence, payload) VALUES ($1, $2, $3, $4, $5)", rows
        )
    tally.events += len(rows)
    tally.requests_undelivered += len(undelivered)
    return len(rows)
