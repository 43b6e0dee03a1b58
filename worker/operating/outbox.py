"""`outbox stats|list|retry|park|discard`: the events that have not been published."""

import argparse
import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, get_args

import msgspec

from service.operations import emails, operator_actions, operator_arguments
from service.outbox import lanes as outbox_lanes
from service.outbox.events import RequestCreated
from service.postgres import loans
from service.postgres.pool import Connection
from worker.operating import arguments, connections, outbox_statements, replay
from worker.operating.answers import Answer, OperatorError, table
from worker.operating.arguments import InvalidArgument, Subcommands, add_command, add_group
from worker.operating.outbox_statements import EventKey, State, UndeliveredEvent
from worker.relay.lanes import lock_lanes

STATES: tuple[State, ...] = get_args(State)

LANE_SECONDS = 30.0  # to wait for a lane: longer than a relay may hold it
_LANE_POLL_SECONDS = 0.02
_BUSY = "busy: a relay holds its lane; try again"


class LaneBusy(OperatorError):
    """A relay holds the lane of these events: try again."""


class Backlog(msgspec.Struct, frozen=True):
    """The number of events of one lane, type and state, and the age of the oldest."""

    lane: int
    type: str
    state: State
    events: int
    oldest_seconds: float


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The number of events by state, also by lane and by type, and the age of the oldest."""

    states: dict[State, int]
    oldest_seconds: dict[State, float]
    lanes: dict[int, dict[State, int]]
    types: dict[str, dict[State, int]]


def add_to(commands: Subcommands) -> None:
    """Add the commands to the parser."""
    group = add_group(commands, "outbox", "Show, retry, park, discard and replay events.")
    add_command(group, "stats", stats)
    listing = add_command(group, "list", list_events)
    listing.add_argument("--pending", action="store_true", help="the oldest pending events instead")
    listing.add_argument("--limit", type=arguments.count, default=50, help="default: 50")
    retrying = add_command(group, "retry", retry)
    retrying.add_argument("event_ids", nargs="*", metavar="EVENT_ID")
    retrying.add_argument("--all-parked", action="store_true", help="every parked event")
    parking = add_command(group, "park", park)
    parking.add_argument("event_ids", nargs="+", metavar="EVENT_ID")
    discarding = add_command(group, "discard", discard)
    discarding.add_argument("event_ids", nargs="+", metavar="EVENT_ID")
    for command in (retrying, parking, discarding):
        command.set_defaults(lane_seconds=LANE_SECONDS)
        operator_arguments.add_arguments(command)
    replay.add_to(group)


async def stats(_: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Count the pending, failing, waiting and parked events, by lane and by type."""
    async with connections.postgres(environment) as connection:
        backlog = await read_backlog(connection)
    found = Stats(
        states=_by_state(backlog),
        oldest_seconds={
            state: max((part.oldest_seconds for part in backlog if part.state == state), default=0.0)
            for state in STATES
        },
        lanes={
            lane: _by_state(part for part in backlog if part.lane == lane)
            for lane in sorted({part.lane for part in backlog})
        },
        types={
            name: _by_state(part for part in backlog if part.type == name)
            for name in sorted({part.type for part in backlog})
        },
    )
    return Answer(found, _described(found))


async def read_backlog(connection: Connection) -> list[Backlog]:
    """Count the unpublished events by lane, type and state."""
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


def _by_state(parts: Iterable[Backlog]) -> dict[State, int]:
    totals = Counter[State]()
    for part in parts:
        totals[part.state] += part.events
    return {state: totals[state] for state in STATES}


def _described(found: Stats) -> str:
    totals = [(state, found.states[state], found.oldest_seconds[state]) for state in STATES]
    lanes = [(lane, *states.values()) for lane, states in found.lanes.items()]
    types = [(name, *states.values()) for name, states in found.types.items()]
    tables = [table(("state", "events", "oldest s"), totals)]
    if found.lanes:
        tables += [table(("lane", *STATES), lanes), table(("type", *STATES), types)]
    return "\n\n".join(tables)


async def list_events(options: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Show the oldest held and parked events with their errors, or the oldest pending ones."""
    async with connections.postgres(environment) as connection:
        if options.pending:
            found = await outbox_statements.read_heads(connection, outbox_lanes.LANES, limit=options.limit)
        else:
            found = await outbox_statements.read_held(connection, limit=options.limit)
    headings = ("event id", "state", "attempts", "last error", "written", "next attempt", "parked since")
    return Answer(found, table(headings, map(_row, found)) if found else "none")


def _row(event: UndeliveredEvent) -> tuple[object, ...]:
    return (
        event.event_id,  # contains the uuid of the request, and the type
        event.state,
        event.attempts,
        event.last_error,
        event.created_at,
        event.next_attempt_at,
        event.parked_at,
    )


async def retry(options: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Make held and parked events due now. Their attempts still count: they determine the next delay."""
    if options.all_parked == bool(options.event_ids):
        raise InvalidArgument("name the events to retry, or --all-parked")
    keys = _keys(options.event_ids)
    command = _Command("outbox retry", "due now", outbox_statements.retry)
    async with connections.postgres(environment) as connection:
        if options.all_parked:
            keys = await outbox_statements.read_parked(connection)
        outcomes = await command.carry_out(connection, keys, options)
        await outbox_lanes.notify(connection)
        states = await outbox_statements.read_states(connection, keys)
    unchanged = {key: _NOT_RETRIED[state] for key, state in states.items() if state in _NOT_RETRIED}
    return _answer(keys, unchanged | outcomes, otherwise="not held")


_NOT_RETRIED = {"failing": "due already", "waiting": "due in its turn"}


async def park(options: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Hold events back until they are retried. Later events of their requests wait behind them."""
    keys = _keys(options.event_ids)
    command = _Command("outbox park", "parked", outbox_statements.park)
    async with connections.postgres(environment) as connection:
        outcomes = await command.carry_out(connection, keys, options)
        states = await outbox_statements.read_states(connection, keys)
    parked = {key: "parked before" for key, state in states.items() if state == "parked"}
    return _answer(keys, parked | outcomes, otherwise="not in the outbox")


async def discard(options: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Delete events that can never be published, for good. Later events of their requests are then published.

    Without its request.created a request gets no e-mail: request.email_failed says so.
    """
    if not options.reason:
        raise InvalidArgument("say why with --reason: a discarded event cannot be restored")
    keys = _keys(options.event_ids)
    command = _Command(operator_actions.DISCARD, "discarded", _discard)
    async with connections.postgres(environment) as connection:
        outcomes = await command.carry_out(connection, keys, options)
        await outbox_lanes.notify(connection)
        ids = await operator_actions.discarded(connection, [key.request_id for key in keys])
    discarded = {key: "discarded before" for key in keys if key.event_id in ids}
    return _answer(keys, discarded | outcomes, otherwise="not in the outbox")


async def _discard(connection: Connection, lane: int, keys: Sequence[EventKey]) -> list[EventKey]:
    discarded = await outbox_statements.discard(connection, lane, keys)
    created = [key for key in discarded if key.type == RequestCreated.type]
    await emails.cancel_first(connection, {key.event_id: key.request_id for key in created})
    return discarded


class _Command(NamedTuple):
    """A command that changes events: its words on the record, its outcome for each event, and its work."""

    words: str
    outcome: str
    work: Callable[[Connection, int, Sequence[EventKey]], Awaitable[list[EventKey]]]

    async def carry_out(
        self, connection: Connection, keys: Sequence[EventKey], options: argparse.Namespace
    ) -> dict[EventKey, str]:
        """Change events lane by lane, each lane with its record in one transaction.

        Returns the outcomes: of those that were changed, and of those whose lane stayed busy.
        """
        by = operator_arguments.operator(options)
        outcomes: dict[EventKey, str] = {}
        for lane, in_lane in (await outbox_statements.by_lane(connection, keys)).items():
            try:
                async with locked_lane(connection, lane, options.lane_seconds):
                    changed = await self.work(connection, lane, in_lane)
                    record = [(key.request_id, key.event_id) for key in changed]
                    await operator_actions.record(connection, self.words, record, by)
            except LaneBusy:
                outcomes |= dict.fromkeys(in_lane, _BUSY)
            else:
                outcomes |= dict.fromkeys(changed, self.outcome)
        return outcomes


def _keys(event_ids: Sequence[str]) -> list[EventKey]:
    keys = []
    for event_id in event_ids:
        key = EventKey.parse(event_id)
        if key is None:
            raise InvalidArgument(f"{event_id!r} is not an event id: see `outbox list`")
        keys.append(key)
    return keys


def _answer(asked: Sequence[EventKey], outcomes: Mapping[EventKey, str], *, otherwise: str) -> Answer:
    """Answer with the outcome for each event. A missing one is not an error: it may have been published."""
    found = {key.event_id: outcomes.get(key, otherwise) for key in asked}
    text = table(("event id", "outcome"), found.items()) if found else "none"
    return Answer(found, text, status=int(_BUSY in found.values()))


@asynccontextmanager
async def locked_lane(connection: Connection, lane: int, seconds: float) -> AsyncIterator[None]:
    """Hold a lane as a relay does, whose pass relies on the rows it has read.

    Raises LaneBusy when a relay still holds it after *seconds*. Postgres frees the lane when this process
    vanishes: TCP would keep it locked for two hours.
    """
    for _ in range(int(seconds / _LANE_POLL_SECONDS)):
        async with loans.bounded_transaction(connection):
            if (await lock_lanes(connection, [lane])).lanes:
                yield
                return
        await asyncio.sleep(_LANE_POLL_SECONDS)
    raise LaneBusy
