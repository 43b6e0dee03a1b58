"""`outbox replay`: writes events to the outbox again, from the rows of their requests."""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec

from service.calculation_requests import erased, event_history, reading
from service.calculation_requests.event_history import EventHistory, RecordedEvent
from service.calculation_requests.model import RequestNotFound
from service.identifiers import first_id_at, uuid_of
from service.operations import operator_arguments
from service.operations.operator_actions import Operator
from service.outbox import events, lanes
from service.outbox.events import EVENT_TYPES, RequestCreated
from service.postgres import loans
from service.postgres.pool import Connection
from worker.operating import arguments, connections
from worker.operating.answers import Answer, OperatorError
from worker.operating.arguments import InvalidArgument, Subcommands, add_command

_POLL_SECONDS = 0.25
_PROGRESS_SECONDS = 10.0
# A request's id is made moments after its created_at. Clocks that were set may account for more.
_CLOCK_SLACK = timedelta(minutes=1)


class OutboxNotDraining(OperatorError):
    """The outbox is full and does not drain: is a relay running? What was replayed so far is kept."""


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
            for recorded in history.recorded_events()
            if recorded.event.type in self.types
            and (self.since is None or recorded.at >= self.since)
            and recorded.at < self.until
        ]

    def first_id(self) -> UUID:
        """Return an id below those of all requests concerned. Later events may be of much older requests."""
        if self.since is None or self.types != {RequestCreated.type}:
            return UUID(int=0)
        return first_id_at(self.since - _CLOCK_SLACK)


class EventToReplay(msgspec.Struct, frozen=True):
    """A row of the outbox to be written again. It has no trace: the row of the request does not keep it."""

    lane: int
    request_id: UUID
    type: str
    sequence: int
    payload: bytes


class Cause(msgspec.Struct, frozen=True):
    """What a replay is recorded under: the words of the command, and the operator."""

    action: str
    by: Operator


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a replay's steps, and how full the outbox may be."""

    page_requests: int = 1000  # read by one statement
    batch_requests: int = 100  # locked by one transaction
    pending: int = 10_000  # A replay waits while more is pending: new events queue behind its own.
    wait_seconds: float = 60.0


DEFAULT_LIMITS = Limits()


class Tally(msgspec.Struct, kw_only=True):
    """What a replay did, or would do."""

    dry_run: bool
    requests: int = 0
    events: int = 0
    types: Counter[str] = msgspec.field(default_factory=Counter)
    requests_undelivered: int = 0  # left out: an event of theirs has not been published

    def add(self, recorded_events: Sequence[RecordedEvent]) -> None:
        """Count the selected events of one request."""
        self.requests += bool(recorded_events)
        self.events += len(recorded_events)
        self.types.update(recorded.event.type for recorded in recorded_events)


def add_to(commands: Subcommands) -> None:
    """Add the command to the parser."""
    command = add_command(commands, "replay", replay_events)
    command.set_defaults(limits=DEFAULT_LIMITS)
    add = command.add_argument
    add("--from", dest="since", type=arguments.time, metavar="TIME", help="ISO 8601, UTC without an offset")
    add("--to", dest="until", type=arguments.time, metavar="TIME", help="exclusive (default: now)")
    add(
        "--type",
        dest="types",
        action="append",
        type=arguments.event_type,
        metavar="TYPE",
        help="repeatable (default: all)",
    )
    add("--uuid", type=arguments.request_id, help="only events of this request: req_…")
    add(
        "--rate", type=arguments.positive, default=200.0, metavar="N", help="events per second (default: 200)"
    )
    add("--dry-run", action="store_true", help="count the events, write nothing")
    operator_arguments.add_arguments(command)


async def replay_events(options: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Publish events again with the same ids and bodies, but without their traces."""
    if options.since is None and options.uuid is None:
        raise InvalidArgument("say which events to replay: --from, or --uuid")
    selection = Selection(
        since=options.since,
        until=options.until or datetime.now(UTC),
        types=frozenset(options.types or EVENT_TYPES),
        request_id=options.uuid,
    )
    async with connections.postgres(environment) as connection:
        if options.dry_run:
            tally = await count(connection, selection, options.limits)
        else:
            tally = await replay(
                connection,
                _ids_of(connection, selection, options.limits),
                selection,
                cause=Cause("outbox replay", operator_arguments.operator(options)),
                limits=options.limits,
                events_per_second=options.rate,
                report=_progress(),
            )
    return Answer(tally, _described(tally))


def _progress() -> Callable[[Tally], None]:
    """Return a function that prints the progress of a replay to stderr every few seconds."""
    last = time.monotonic()

    def report(tally: Tally) -> None:
        nonlocal last
        if time.monotonic() - last >= _PROGRESS_SECONDS:
            last = time.monotonic()
            sys.stderr.write(f"{tally.events} events so far\n")

    return report


def _described(tally: Tally) -> str:
    verb = "would be replayed" if tally.dry_run else "replayed"
    lines = [f"{tally.events} events of {tally.requests} requests {verb}"]
    lines += [f"  {name}  {events}" for name, events in sorted(tally.types.items())]
    if tally.requests_undelivered:
        lines.append(f"{tally.requests_undelivered} requests left out: they have unpublished events")
    return "\n".join(lines)


async def count(connection: Connection, selection: Selection, limits: Limits) -> Tally:
    """Return what a replay would do if every earlier event had been published."""
    tally = Tally(dry_run=True)
    async for page in _pages(connection, selection, limits):
        for history in page:
            tally.add(selection.of(history))
    return tally


async def replay(
    connection: Connection,
    pages: AsyncIterator[Sequence[UUID]],
    selection: Selection,
    *,
    cause: Cause,
    events_per_second: float,
    report: Callable[[Tally], None],
    limits: Limits = DEFAULT_LIMITS,
) -> Tally:
    """Write the selected events of these requests again, at most at this rate. Calls *report* for each batch.

    A request with an unpublished event is left out: that event will be published anyway, and would be out of
    order after the replay of an earlier one. Raises OutboxNotDraining.
    """
    tally = Tally(dry_run=False)
    clock = asyncio.get_running_loop()
    due = clock.time()
    size = max(1, min(limits.batch_requests, int(events_per_second)))
    async for page in pages:
        for batch in (page[start : start + size] for start in range(0, len(page), size)):
            await _wait_for_room(connection, limits)
            written = await replay_batch(connection, batch, selection, tally, cause)
            await lanes.notify(connection)
            report(tally)
            due = max(due, clock.time() - 1.0) + written / events_per_second
            await asyncio.sleep(max(0.0, due - clock.time()))
    return tally


async def replay_batch(
    connection: Connection, request_ids: Sequence[UUID], selection: Selection, tally: Tally, cause: Cause
) -> int:
    """Write the selected events of some requests again, and record each. Returns their number.

    The requests are locked, so that no new event comes between those of one request. One that has been erased
    meanwhile is left out.
    """
    rows: list[EventToReplay] = []
    async with loans.bounded_transaction(connection):
        await reading.lock_all(connection, request_ids)
        undelivered = await _with_undelivered(connection, request_ids)
        tally.requests_undelivered += len(undelivered)
        for history in await event_history.read(connection, request_ids):
            request_id = history.request.id
            if request_id in undelivered:
                continue
            selected = selection.of(history)
            tally.add(selected)
            for recorded in selected:
                event = recorded.event
                payload = events.encode(event, time=recorded.at, traceparent=None)
                lane = lanes.lane_of(request_id)
                rows.append(EventToReplay(lane, request_id, event.type, event.sequence, payload))
        await _append(connection, rows, cause)
    return len(rows)


async def _ids_of(connection: Connection, selection: Selection, limits: Limits) -> AsyncIterator[list[UUID]]:
    """Yield the ids of the requests with a selected event, in pages."""
    async for page in _pages(connection, selection, limits):
        yield [history.request.id for history in page if selection.of(history)]


async def _pages(
    connection: Connection, selection: Selection, limits: Limits
) -> AsyncIterator[list[EventHistory]]:
    """Yield the histories that may contain a selected event, in pages."""
    if selection.request_id is not None:
        histories = await event_history.read(connection, [selection.request_id])
        if not histories:
            await erased.check(connection, selection.request_id)
            raise RequestNotFound
        yield histories
        return
    after, before = selection.first_id(), first_id_at(selection.until + _CLOCK_SLACK)
    while page := await event_history.read_page(
        connection, after=after, before=before, limit=limits.page_requests
    ):
        yield page
        after = page[-1].request.id


async def _wait_for_room(connection: Connection, limits: Limits) -> None:
    """Wait until the outbox has room for a batch: a replay must not delay new events by much."""
    for _ in range(int(limits.wait_seconds / _POLL_SECONDS)):
        if await has_room(connection, limits.pending):
            return
        await asyncio.sleep(_POLL_SECONDS)
    raise OutboxNotDraining


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


async def _with_undelivered(connection: Connection, request_ids: Sequence[UUID]) -> set[UUID]:
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


async def _append(connection: Connection, rows: Sequence[EventToReplay], cause: Cause) -> None:
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
        [event.lane for event in rows],
        [event.request_id for event in rows],
        [event.type for event in rows],
        [event.sequence for event in rows],
        [event.payload for event in rows],
        [events.event_id(uuid_of(event.request_id), event.type, event.sequence) for event in rows],
        cause.action,
        cause.by.name,
        cause.by.reason,
    )
