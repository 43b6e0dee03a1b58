"""`outbox replay`: writes events to the outbox again, from the rows of their requests."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import click
import msgspec

from service import command_line
from service.calculation_requests import erased, event_history, reading
from service.calculation_requests.event_history import EventHistory, RecordedEvent
from service.calculation_requests.model import RequestNotFound
from service.command_line import Answer, answering, cell, on_record
from service.identifiers import first_id_at
from service.operations import operator_actions
from service.operations.operator_actions import Operator
from service.outbox import events, lanes
from service.outbox.events import EVENT_TYPES, RequestCreated
from service.postgres import loans
from service.postgres.pool import Connection

_PAGE_REQUESTS = 1000  # read by one statement
_BATCH_REQUESTS = 100  # locked by one transaction
_MOST_PENDING = 10_000  # A replay waits while more is pending: new events queue behind its own.
_POLL_SECONDS = 0.25
ROOM_SECONDS = 60.0
# A request's id is made moments after its created_at. Clocks that were set may account for more.
_CLOCK_SLACK = timedelta(minutes=1)


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which events to replay: those written at or after *since* and before *until*, of these types."""

    since: datetime | None
    until: datetime
    types: frozenset[str]
    request_id: UUID | None = None

    def of(self, history: EventHistory) -> list[RecordedEvent]:
        """Return the selected events of a request, in order."""
        return [
            recorded
            for recorded in history.recorded_events
            if recorded.event.type in self.types
            and (self.since is None or recorded.at >= self.since)
            and recorded.at < self.until
        ]

    def first_id(self) -> UUID:
        """Return an id below those of all requests concerned. Later events may be of much older requests."""
        if self.since is None or self.types != {RequestCreated.type}:
            return UUID(int=0)
        return first_id_at(self.since - _CLOCK_SLACK)


class Tally(msgspec.Struct):
    """The events that were replayed, or would be."""

    requests: int = 0
    events: int = 0
    types: Counter[str] = msgspec.field(default_factory=Counter)
    requests_undelivered: int = 0  # left out: an event of theirs has not been published

    def add(self, recorded_events: Sequence[RecordedEvent]) -> None:
        """Count the selected events of one request."""
        self.requests += bool(recorded_events)
        self.events += len(recorded_events)
        self.types.update(recorded.event.type for recorded in recorded_events)

    def described(self, verb: str) -> str:
        """Return this as text."""
        lines = [f"{self.events} events of {self.requests} requests {verb}"]
        lines += [f"  {name}  {number}" for name, number in sorted(self.types.items())]
        if self.requests_undelivered:
            lines.append(f"{self.requests_undelivered} requests left out: they have unpublished events")
        return "\n".join(lines)


@click.command("replay")
@click.option("--from", "since", type=command_line.time, metavar="TIME", help="ISO 8601; else in UTC.")
@click.option("--to", "until", type=command_line.time, metavar="TIME", help="Exclusive (default: now).")
@click.option("--type", "types", multiple=True, type=command_line.EVENT_TYPE, help="Repeatable; else all.")
@click.option("--uuid", "request_id", type=command_line.uuid, help="Only events of this request: req_…")
@click.option("--rate", type=command_line.POSITIVE, default=200, show_default=True, help="Events per second.")
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
        since=since,
        until=until or datetime.now(UTC),
        types=frozenset(types or EVENT_TYPES),
        request_id=request_id,
    )
    async with command_line.postgres() as connection:
        planned, request_ids = await find(connection, selection)
        if dry_run:
            return Answer(planned, planned.described("would be replayed"))
        subject = f"{planned.events} events from {cell(since)} to {cell(selection.until)}"
        await operator_actions.record(connection, "outbox replay", [(request_id, subject)], by)
        with command_line.progress("replaying", len(request_ids)) as advance:
            done = await replay(connection, request_ids, selection, events_per_second=rate, advance=advance)
    return Answer(done, done.described("replayed"))


async def find(connection: Connection, selection: Selection) -> tuple[Tally, list[UUID]]:
    """Return what a replay would do if every earlier event had been published, and the requests concerned."""
    tally, request_ids = Tally(), []
    async for history in _histories(connection, selection):
        if selected := selection.of(history):
            tally.add(selected)
            request_ids.append(history.request.id)
    return tally, request_ids


async def _histories(connection: Connection, selection: Selection) -> AsyncIterator[EventHistory]:
    """Yield the histories that may contain a selected event. Raises RequestErased and RequestNotFound."""
    if selection.request_id is not None:
        for history in await event_history.read(connection, [selection.request_id]):
            yield history
            return
        await erased.check(connection, selection.request_id)
        raise RequestNotFound
    after, before = selection.first_id(), first_id_at(selection.until + _CLOCK_SLACK)
    while page := await event_history.read_page(connection, after=after, before=before, limit=_PAGE_REQUESTS):
        for history in page:
            yield history
        after = page[-1].request.id


async def replay(
    connection: Connection,
    request_ids: Sequence[UUID],
    selection: Selection,
    *,
    events_per_second: int,
    advance: Callable[[int], None],
) -> Tally:
    """Write the selected events of these requests again, at most at this rate. *advance* counts the requests.

    A request with an unpublished event is left out: that event will be published anyway, and would be out of
    order after the replay of an earlier one.
    """
    tally = Tally()
    clock = asyncio.get_running_loop()
    due = clock.time()
    size = min(_BATCH_REQUESTS, events_per_second)
    for start in range(0, len(request_ids), size):
        batch = request_ids[start : start + size]
        await _wait_for_room(connection)
        written = await replay_batch(connection, batch, selection, tally)
        await lanes.notify(connection)
        advance(len(batch))
        due = max(due, clock.time() - 1.0) + written / events_per_second
        await asyncio.sleep(max(0.0, due - clock.time()))
    return tally


async def _wait_for_room(connection: Connection) -> None:
    """Wait until the outbox has room for a batch: a replay must not delay new events by much."""
    for _ in range(int(ROOM_SECONDS / _POLL_SECONDS)):
        pending = await connection.fetchval(
            "SELECT count(*) FROM (SELECT FROM outbox LIMIT $1) AS counted", _MOST_PENDING
        )
        if pending < _MOST_PENDING:
            return
        await asyncio.sleep(_POLL_SECONDS)
    raise click.ClickException(
        "The outbox is full and does not drain: is a relay running? What was replayed so far is kept."
    )


async def replay_batch(
    connection: Connection, request_ids: Sequence[UUID], selection: Selection, tally: Tally
) -> int:
    """Write the selected events of some requests again, and count them. Returns their number.

    The requests are locked, so that no new event comes between those of one request. One that has been erased
    meanwhile is left out.
    """
    rows: list[tuple[int, UUID, str, int, bytes]] = []
    async with loans.bounded_transaction(connection):
        await reading.lock_all(connection, request_ids)
        undelivered = await _find_undelivered(connection, request_ids)
        tally.requests_undelivered += len(undelivered)
        for history in await event_history.read(connection, request_ids):
            request_id = history.request.id
            if request_id in undelivered:
                continue
            selected = selection.of(history)
            tally.add(selected)
            for event, at in map(msgspec.structs.astuple, selected):
                payload = events.encode(event, time=at, traceparent=None)
                rows.append((lanes.lane_of(request_id), request_id, event.type, event.sequence, payload))
        await connection.executemany(
            "INSERT INTO outbox (lane, request_id, type, sequence, payload) VALUES ($1, $2, $3, $4, $5)", rows
        )
    return len(rows)


async def _find_undelivered(connection: Connection, request_ids: Sequence[UUID]) -> set[UUID]:
    """Return those of the requests that have unpublished events."""
    rows = await connection.fetch(
        "SELECT request_id FROM undelivered_event WHERE request_id = ANY($1)", request_ids
    )
    return {row["request_id"] for row in rows}
