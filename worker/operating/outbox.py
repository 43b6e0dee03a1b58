"""The commands on the outbox: what is in it and why, again now, aside, and all over again."""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import get_args

import msgspec

from service.outbox import writing
from service.outbox.events import EVENT_TYPES
from service.postgres import loans
from service.postgres.pool import Connection
from worker.operating import outbox_statements, replay
from worker.operating.arguments import InvalidArgument
from worker.operating.outbox_statements import Backlog, EventKey, State, UndeliveredEvent
from worker.operating.replay import Selection, Tally
from worker.operating.tables import Answer, table
from worker.relay.lanes import lock_lanes

STATES: tuple[State, ...] = get_args(State)

_LANE_SECONDS = 30.0  # longer than a relay may hold a lane
_LANE_LOOK_SECONDS = 0.02
_PROGRESS_SECONDS = 10.0
_END_WHEN_SILENT = f"SET LOCAL idle_in_transaction_session_timeout = '{loans.SILENCE_SECONDS:g}s'"


class LaneBusy(Exception):
    """A relay keeps the lane of these events: try again."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The outbox in numbers: events by state, and the same by lane and by type."""

    states: dict[State, int]
    oldest_seconds: dict[State, float]
    lanes: dict[int, dict[State, int]]
    types: dict[str, dict[State, int]]


async def stats(connection: Connection, _: argparse.Namespace) -> Answer:
    """Show how many events are pending, failing, waiting and parked, by lane and by type."""
    backlog = await outbox_statements.read_backlog(connection)
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


async def list_events(connection: Connection, arguments: argparse.Namespace) -> Answer:
    """Show the oldest events that are held or parked, and why; or those at the head of the outbox."""
    if arguments.pending:
        found = await outbox_statements.read_heads(connection, writing.LANES, limit=arguments.limit)
    else:
        found = await outbox_statements.read_held(connection, limit=arguments.limit)
    headings = ("event id", "state", "attempts", "last error", "written", "next attempt", "parked since")
    return Answer(found, table(headings, map(_row, found)) if found else "none")


def _row(event: UndeliveredEvent) -> tuple[object, ...]:
    return (
        event.event_id,  # begins with the request's uuid, and holds the type
        event.state,
        event.attempts,
        event.last_error,
        event.created_at,
        event.next_attempt_at,
        event.parked_at,
    )


async def retry(connection: Connection, arguments: argparse.Namespace) -> Answer:
    """Make held and parked events due now. Their attempts count for the next wait."""
    if arguments.all_parked == bool(arguments.event_ids):
        raise InvalidArgument("name the events to retry, or --all-parked")
    keys = _keys(arguments.event_ids)
    retried: list[EventKey] = []
    if arguments.all_parked:
        for lane in await outbox_statements.lanes_with_parked(connection):
            async with _locked_lane(connection, lane):
                retried += await outbox_statements.retry_parked(connection, lane)
    for lane in await outbox_statements.lanes_of(connection, keys):
        async with _locked_lane(connection, lane):
            retried += await outbox_statements.retry(connection, lane, keys)
    await writing.notify(connection)
    return _outcomes([(key, "due now") for key in retried], keys, "not held")


async def park(connection: Connection, arguments: argparse.Namespace) -> Answer:
    """Put events aside until they are retried; the later events of their requests wait behind them."""
    keys = _keys(arguments.event_ids)
    parked = set()
    for lane in await outbox_statements.lanes_of(connection, keys):
        async with _locked_lane(connection, lane):
            for key in keys:
                held = await outbox_statements.park_held(connection, lane, key)
                if held or await outbox_statements.park_pending(connection, lane, key):
                    parked.add(key)
    return _outcomes([(key, "parked") for key in sorted(parked)], keys, "not in the outbox")


def _keys(event_ids: Sequence[str]) -> list[EventKey]:
    keys = []
    for event_id in event_ids:
        key = EventKey.parse(event_id)
        if key is None:
            raise InvalidArgument(f"{event_id!r} is not an event id, as `outbox list` shows them")
        keys.append(key)
    return keys


def _outcomes(done: Sequence[tuple[EventKey, str]], asked: Sequence[EventKey], missing: str) -> Answer:
    """Say what became of each event. One that is gone is no error: it was delivered, or never was."""
    outcomes = {key.event_id: outcome for key, outcome in done}
    for key in asked:
        outcomes.setdefault(key.event_id, missing)
    return Answer(outcomes, table(("event id", "outcome"), outcomes.items()) if outcomes else "none")


@asynccontextmanager
async def _locked_lane(connection: Connection, lane: int) -> AsyncIterator[None]:
    """Hold a lane as a relay does: it must find at the end of a pass what it read at the beginning.

    If we vanish without a word, Postgres frees the lane: else it would be kept for two hours.
    """
    for _ in range(int(_LANE_SECONDS / _LANE_LOOK_SECONDS)):
        async with connection.transaction():
            await connection.execute(_END_WHEN_SILENT)
            if (await lock_lanes(connection, [lane])).lanes:
                yield
                return
        await asyncio.sleep(_LANE_LOOK_SECONDS)
    raise LaneBusy


async def replay_events(connection: Connection, arguments: argparse.Namespace) -> Answer:
    """Write events to the outbox again, as they were but for their trace. Consumers know them by id."""
    if arguments.since is None and arguments.uuid is None:
        raise InvalidArgument("say which events to replay: --from, or --uuid")
    selection = Selection(
        since=arguments.since,
        until=arguments.until or datetime.now(UTC),
        types=frozenset(arguments.types or EVENT_TYPES),
        request_id=arguments.uuid,
    )
    if arguments.dry_run:
        tally = await replay.count(connection, selection)
    else:
        tally = await replay.replay(
            connection, selection, events_per_second=arguments.rate, report=_progress()
        )
    return Answer(tally, _summed_up(tally))


def _progress() -> Callable[[Tally], None]:
    """Return a report, for a person, of how far a replay is: every few seconds."""
    last = time.monotonic()

    def report(tally: Tally) -> None:
        nonlocal last
        if time.monotonic() - last >= _PROGRESS_SECONDS:
            last = time.monotonic()
            sys.stderr.write(f"{tally.events} events so far\n")

    return report


def _summed_up(tally: Tally) -> str:
    verb = "would be replayed" if tally.dry_run else "replayed"
    lines = [f"{tally.events} events of {tally.requests} requests {verb}"]
    lines += [f"  {name}  {events}" for name, events in sorted(tally.types.items())]
    if tally.requests_undelivered:
        lines.append(
            f"{tally.requests_undelivered} requests left out: an event of theirs has yet to be delivered"
        )
    if tally.events_unknown:
        lines.append(f"{tally.events_unknown} events left out: their rows lack the sequence")
    return "\n".join(lines)
