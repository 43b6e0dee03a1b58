"""Replay: the same events again, made from the rows, in order within each request."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime, timedelta
from uuid import UUID

import msgspec

from service.calculation_requests import reading
from service.calculation_requests.model import RequestNotFound
from service.outbox import events, writing
from service.outbox.events import RequestCreated
from service.postgres.pool import Connection
from worker.operating import outbox_statements, request_history
from worker.operating.outbox_statements import EventToReplay
from worker.operating.request_history import Happening, History

_PAGE_REQUESTS = 1000  # looked at by one statement
_BATCH_REQUESTS = 100  # locked by one transaction
_PENDING_LIMIT = 10_000  # Beyond this a replay waits: new events stand behind its own.
_WAIT_SECONDS = 60.0
_LOOK_SECONDS = 0.25
# A request's id is made moments after its created_at; more than that is clocks being set.
_CLOCK_SLACK = timedelta(minutes=1)


class OutboxNotDraining(Exception):
    """The outbox is full and does not drain: no relay seems to work. What was replayed so far is kept."""


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which events to replay: those written from *since*, before *until*, of these types."""

    since: datetime | None
    until: datetime
    types: frozenset[str]
    request_id: UUID | None = None

    def of(self, history: History) -> list[Happening]:
        """Return the selected events of a request, in order."""
        return [
            happening
            for happening in history.happenings()
            if happening.type in self.types
            and (self.since is None or happening.at >= self.since)
            and happening.at < self.until
        ]

    def earliest_id(self) -> UUID:
        """Return an id below that of every request concerned. Later events may be of any older request."""
        if self.since is None or self.types != {RequestCreated.type}:
            return UUID(int=0)
        return request_history.id_at(self.since - _CLOCK_SLACK)


class Tally(msgspec.Struct, kw_only=True):
    """What a replay did, or would do."""

    dry_run: bool
    requests: int = 0
    events: int = 0
    types: Counter[str] = msgspec.field(default_factory=Counter)
    requests_undelivered: int = 0  # left out: something of theirs has yet to leave the outbox
    events_unknown: int = 0  # left out: the row lacks their sequence

    def add(self, happenings: Sequence[Happening]) -> list[Happening]:
        """Count the selected events of one request, and return those that can be made again."""
        known = [happening for happening in happenings if happening.sequence is not None]
        self.requests += bool(known)
        self.events += len(known)
        self.types.update(happening.type for happening in known)
        self.events_unknown += len(happenings) - len(known)
        return known


async def count(connection: Connection, selection: Selection) -> Tally:
    """Return what a replay would do, were every earlier event delivered."""
    tally = Tally(dry_run=True)
    async for page in _pages(connection, selection):
        for history in page:
            tally.add(selection.of(history))
    return tally


async def replay(
    connection: Connection, selection: Selection, *, events_per_second: float, report: Callable[[Tally], None]
) -> Tally:
    """Write the selected events to the outbox again, on the terms of `replay_requests`."""
    matching = (
        [history.id for history in page if selection.of(history)]
        async for page in _pages(connection, selection)
    )
    return await replay_requests(
        connection, matching, selection, events_per_second=events_per_second, report=report
    )


async def replay_requests(
    connection: Connection,
    pages: AsyncIterator[Sequence[UUID]],
    selection: Selection,
    *,
    events_per_second: float,
    report: Callable[[Tally], None],
) -> Tally:
    """Write the selected events of these requests again, no faster than given; *report* is given each batch.

    A request of which any event is still to be delivered is left out: what is pending will be delivered
    anyway, and would be out of order after a replay of an earlier one. Raises OutboxNotDraining.
    """
    tally = Tally(dry_run=False)
    clock = asyncio.get_running_loop()
    due = clock.time()
    size = max(1, min(_BATCH_REQUESTS, int(events_per_second)))
    async for page in pages:
        for batch in (page[start : start + size] for start in range(0, len(page), size)):
            await _wait_for_room(connection)
            written = await replay_batch(connection, batch, selection, tally)
            await writing.notify(connection)
            report(tally)
            due = max(due, clock.time() - 1.0) + written / events_per_second
            await asyncio.sleep(max(0.0, due - clock.time()))
    return tally


async def replay_batch(
    connection: Connection, request_ids: Sequence[UUID], selection: Selection, tally: Tally
) -> int:
    """Write the selected events of some requests again. Returns their number.

    The requests are locked in the order of their ids, so that two replays cannot block each other and no new
    event comes between those of one request.
    """
    rows: list[EventToReplay] = []
    async with connection.transaction():
        requests = {
            request_id: await reading.lock(connection, request_id) for request_id in sorted(request_ids)
        }
        undelivered = await outbox_statements.with_undelivered(connection, request_ids)
        tally.requests_undelivered += len(undelivered)
        for history in await request_history.read(connection, request_ids):
            if history.id in undelivered:
                continue
            for happening in tally.add(selection.of(history)):
                event = history.event(happening, requests[history.id])
                payload = events.encode(event, time=happening.at, traceparent=None)
                lane = writing.lane_of(history.id)
                rows.append(EventToReplay(lane, history.id, event.type, event.sequence, payload))
        await outbox_statements.append_replayed(connection, rows)
    return len(rows)


async def _pages(connection: Connection, selection: Selection) -> AsyncIterator[list[History]]:
    """Yield the histories among which the selected events are."""
    if selection.request_id is not None:
        histories = await request_history.read(connection, [selection.request_id])
        if not histories:
            raise RequestNotFound
        yield histories
        return
    after, before = selection.earliest_id(), request_history.id_at(selection.until + _CLOCK_SLACK)
    while page := await request_history.read_page(
        connection, after=after, before=before, limit=_PAGE_REQUESTS
    ):
        yield page
        after = page[-1].id


async def _wait_for_room(connection: Connection) -> None:
    """Wait until the outbox has room for a batch: a replay must not delay new events by much."""
    for _ in range(int(_WAIT_SECONDS / _LOOK_SECONDS)):
        if await outbox_statements.has_room(connection, _PENDING_LIMIT):
            return
        await asyncio.sleep(_LOOK_SECONDS)
    raise OutboxNotDraining
