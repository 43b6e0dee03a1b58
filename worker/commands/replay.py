"""`outbox replay`: writes events to the outbox again, rebuilt from the rows of their requests."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from uuid import UUID

import click
import msgspec

from service.calculation_requests import event_history
from service.calculation_requests.changing import change_all
from service.calculation_requests.event_history import EventHistory, RecordedEvent
from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, answering, cell, on_record, progress
from service.command_line.operator_actions import Operator
from service.outbox import events, lanes
from service.outbox.events import EVENT_TYPES
from service.postgres import connections
from service.postgres.pool import Connection

_PAGE_REQUESTS = 1000  # read by one statement
_BATCH_REQUESTS = 100  # locked by one transaction
EVENTS_PER_SECOND = 200


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which events to replay: those written at or after *since* and before *until*, of these types."""

    since: datetime | None
    until: datetime
    types: frozenset[str]

    def of(self, history: EventHistory) -> list[RecordedEvent]:
        """Return the selected events of a request, in order."""
        return [
            recorded
            for recorded in history.recorded_events
            if recorded.type in self.types
            and (self.since is None or recorded.at >= self.since)
            and recorded.at < self.until
        ]


class Tally(msgspec.Struct):
    """How many events were replayed, or would be replayed in a dry run."""

    requests: int = 0
    events: int = 0
    requests_undelivered: int = 0  # requests that were skipped, because they have unpublished events

    def add(self, selected: Sequence[RecordedEvent]) -> None:
        """Count the selected events of one request."""
        self.requests += bool(selected)
        self.events += len(selected)

    def answer(self, verb: str) -> Answer:
        """Return these numbers as the answer of a command."""
        text = f"{self.events} events of {self.requests} requests {verb}"
        if self.requests_undelivered:
            text += f"\n{self.requests_undelivered} requests left out: they have unpublished events"
        return Answer(self, text)


@click.command("replay")
@click.option(
    "--from", "since", type=parameters.time, metavar="TIME", help="ISO 8601, or 2h for two hours ago."
)
@click.option("--to", "until", type=parameters.time, metavar="TIME", help="Before TIME. Default: now.")
@click.option("--type", "types", multiple=True, type=parameters.EVENT_TYPE, help="This type. Repeatable.")
@click.option("--uuid", "request_id", type=parameters.uuid, help="Only events of this request: req_…")
@click.option(
    "--rate",
    type=parameters.POSITIVE,
    default=EVENTS_PER_SECOND,
    show_default=True,
    help="Events per second.",
)
@click.option("--dry-run", is_flag=True, help="Count the events, write nothing.")
@answering
@on_record
async def replay_events(
    *,
    since: datetime | None,
    until: datetime | None,
    types: Sequence[str],
    request_id: UUID | None,
    rate: int,
    dry_run: bool,
    by: Operator,
) -> Answer:
    """Publish events again with the same ids and bodies, but without their traces."""
    if since is None and request_id is None:
        raise click.UsageError("say which events to replay: --from, or --uuid")
    selection = Selection(
        since=since, until=until or datetime.now(UTC), types=frozenset(types or EVENT_TYPES)
    )
    async with connecting.postgres() as connection:
        planned, request_ids = Tally(), []
        async for history in _histories(connection, request_id):
            if selected := selection.of(history):
                planned.add(selected)
                request_ids.append(history.request.id)
        if dry_run:
            return planned.answer("would be replayed")
        subject = f"{planned.events} events from {cell(since)} to {cell(selection.until)}"
        await operator_actions.record(connection, "outbox replay", [(request_id, subject)], by)
        done = await replay(connection, request_ids, selection, events_per_second=rate)
    return done.answer("replayed")


async def _histories(connection: Connection, request_id: UUID | None) -> AsyncIterator[EventHistory]:
    """Yield the history of this request, or of all requests. Raises RequestErased or RequestNotFound."""
    if request_id is not None:
        yield await event_history.read_internally(connection, request_id)
        return
    after = UUID(int=0)
    while page := await event_history.read_page(connection, after=after, limit=_PAGE_REQUESTS):
        for history in page:
            yield history
        after = page[-1].request.id


async def replay(
    connection: Connection,
    request_ids: Sequence[UUID],
    selection: Selection,
    *,
    events_per_second: int = EVENTS_PER_SECOND,
) -> Tally:
    """Write the selected events again. The rate is limited, because new events queue behind replayed events.

    A request with an unpublished event is skipped: a replay would put earlier events behind that event.
    """
    tally = Tally()
    size = min(_BATCH_REQUESTS, events_per_second)
    with progress("replaying", len(request_ids)) as advance:
        for start in range(0, len(request_ids), size):
            batch = request_ids[start : start + size]
            written = await replay_batch(connection, batch, selection, tally)
            await lanes.notify(connection)
            advance(len(batch))
            await asyncio.sleep(written / events_per_second)
    return tally


async def replay_batch(
    connection: Connection, request_ids: Sequence[UUID], selection: Selection, tally: Tally
) -> int:
    """Write the selected events of some requests again. Count them in *tally*, and return their number.

    The requests are locked, so that no new event comes between the replayed events of a request. Requests
    that have been erased in the meantime are skipped.
    """
    rows: list[tuple[int, UUID, str, int, bytes]] = []
    async with connections.bounded_transaction(connection), change_all(connection, request_ids):
        unpublished = await connection.fetch(
            "SELECT request_id FROM undelivered_event WHERE request_id = ANY($1)", request_ids
        )
        undelivered = {row["request_id"] for row in unpublished}
        tally.requests_undelivered += len(undelivered)
        for history in await event_history.read(connection, request_ids):
            request_id = history.request.id
            if request_id in undelivered:
                continue
            selected = selection.of(history)
            tally.add(selected)
            for recorded in selected:
                event = history.rebuild(recorded)
                payload = events.encode(event, time=recorded.at, traceparent=None)
                rows.append((lanes.lane_of(request_id), request_id, event.type, event.sequence, payload))
        await connection.executemany(
            "INSERT INTO outbox (lane, request_id, type, sequence, payload) VALUES ($1, $2, $3, $4, $5)", rows
        )
    return len(rows)
