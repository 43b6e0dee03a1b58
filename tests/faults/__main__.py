"""The fault harness: `python -m tests.faults`. Exit status 1 if an invariant was breached."""

import argparse
import asyncio
import logging
import math
import random
import secrets
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import takewhile
from pathlib import Path

import uvloop

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import LOCAL, Place, working_folder
from tests.faults.broken_programs import BREAKAGES
from tests.faults.catalogue import CLUSTER_FAULTS, FAULTS
from tests.faults.invariants import check_all
from tests.faults.records import Event, Plan, Record
from tests.faults.stocktaking import drained, table, take_stock
from tests.faults.world import CLOCKS, Fault, World, clustered_servers, started
from tests.harness.programs import variables_of_clock
from tests.harness.servers import Servers, private_servers
from tests.harness.waiting import until

_FOLDER = LOCAL / "faults"
_ROUND_SECONDS = 210.0  # in which every fault is injected once, mixed or alone
_CALM_SECONDS = 4.0  # under load, before the first fault and after the last
_say = partial(print, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=1_900.0, help="of faults under load, at least")
    add("--requests", type=int, help="acknowledged, at least (default: seconds times rate)")
    every = f"that every fault is injected, at least (default: once in {_ROUND_SECONDS:.0f} s)"
    add("--times", type=int, help=every)
    add("--rate", type=float, default=20.0, help="requests a second")
    add("--longest-stall", type=float, default=13.0, help="seconds, more than any timeout")
    add("--recovery", type=float, default=5.0, help="seconds allowed after a fault; more on a busy machine")
    add("--drain", type=float, default=120.0, help="seconds allowed to finish at the end")
    add("--seed", type=int, default=secrets.randbelow(10**9), help="of every random choice (default: random)")
    add("--broken", choices=BREAKAGES, help="break the programs on purpose")
    servers = "three nodes of RabbitMQ and a pair of Postgres, each of whose faults is injected once"
    add("--cluster", action="store_true", help=servers)
    names = sorted(fault.name for fault in (*FAULTS, *CLUSTER_FAULTS))
    only = f"only these: {', '.join(names)}"
    add("--faults", nargs="+", default=names, choices=names, metavar="NAME", help=only)
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.cluster:
        arguments.seconds, arguments.requests, arguments.times = math.inf, 0, 1
    if arguments.requests is None:
        arguments.requests = round(arguments.seconds * arguments.rate)
    if arguments.times is None:
        arguments.times = max(1, round(arguments.seconds / _ROUND_SECONDS))
    _FOLDER.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=_FOLDER / "harness.log", filemode="w", level=logging.WARNING)
    _say(f"seed {arguments.seed}")
    try:
        record = uvloop.run(run(Plan(**vars(arguments))))
    except KeyboardInterrupt:
        _say("stopped")
        return 130
    except LocalStackError as error:
        print(error, file=sys.stderr)
        return 2
    breaches = check_all(record)
    _say("", table(record), "", sep="\n")
    for name, found in breaches.items():
        _say(f"BREACH: {name} ({len(found)})", *found[:12], sep="\n    ")
    _say("" if breaches else "every invariant held")
    return 1 if breaches else 0


async def run(plan: Plan) -> Record:
    """Return the record of a run. The logs of the processes are kept, of the last run only."""
    record = Record(plan=plan)
    chance = random.Random(plan.seed)  # noqa: S311 - repeatable, no secret
    place = Place(folder=_FOLDER, report=_say)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(working_folder(place, "run"))
        # Broken programs may run at the same time.
        stack.callback(_keep_logs, folder, _FOLDER / "logs" / (plan.broken or "working"))
        if plan.cluster:
            servers: Servers = await stack.enter_async_context(clustered_servers(_say))
        else:
            servers = stack.enter_context(private_servers(place))
        async with started(servers, record, folder, chance) as world:
            await _live(world)
            _say("no more load, no more faults: draining …")
            if left := await drained(world, seconds=plan.drain):
                _say(f"not drained after {plan.drain:.0f} s: {left}")
            await asyncio.gather(*(worker.leave() for worker in world.workers))
            await take_stock(world)
    return record


def _keep_logs(folder: Path, logs: Path) -> None:
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    for log in folder.glob("*.log"):
        shutil.move(log, logs)


async def _live(world: World) -> None:
    """Put load on the system, and inject faults until the plan is fulfilled."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(world.callers.run(stop))
        began = time.monotonic()
        try:
            await asyncio.sleep(_CALM_SECONDS)
            await _inject_all(world)
            await asyncio.sleep(_CALM_SECONDS)
        finally:
            world.record.seconds = time.monotonic() - began
            stop.set()


async def _inject_all(world: World) -> None:
    """Inject one round in a cluster, else rounds until the plan is fulfilled or its overtime is over."""
    record, plan, began = world.record, world.record.plan, time.monotonic()
    faults = _possible(plan)
    for group in mixed(faults, world.chance) if plan.cluster else rounds(faults, world.chance):
        elapsed = time.monotonic() - began
        is_fulfilled = elapsed >= plan.seconds and not any(shortfalls_of(faults, record))
        if is_fulfilled or elapsed >= plan.seconds * 2.5 + 60:
            break
        missing = _missing(faults, record) if elapsed >= plan.seconds else []
        if due := [fault for fault in group if fault in missing or not missing]:
            names = " + ".join(fault.name for fault in due)
            seconds = await _inject(due, world)
            unseen = [f", {span.name} not seen" for span in record.spans[-len(due) :] if not span.is_seen]
            done = f"{elapsed:7.1f} s  {len(record.acknowledged):7} requests  recovered in {seconds:5.2f} s"
            _say(f"{done} from {names}{''.join(unseen)}")
            await asyncio.sleep(0.5)
    record.shortfalls += shortfalls_of(faults, record)


def _possible(plan: Plan) -> list[Fault]:
    """Return the faults of the plan. Leave out those of clocks, and say so, without libfaketime."""
    faults = [fault for fault in (CLUSTER_FAULTS if plan.cluster else FAULTS) if fault.name in plan.faults]
    try:
        variables_of_clock(0)
    except LocalStackError as reason:
        _say(f"left out the faults of clocks: {reason}")
        faults = [fault for fault in faults if CLOCKS not in fault.touches]
    return faults


def shortfalls_of(faults: Sequence[Fault], record: Record) -> Iterator[str]:
    """Yield what the plan asks for and has not happened yet."""
    most = max(record.plan.requests, 1)
    if len(record.acknowledged) < most:
        yield f"{len(record.acknowledged)} requests were acknowledged, not {most}"
    for fault in _missing(faults, record):
        yield f"{fault.name}: not seen {record.plan.times} times"


def _missing(faults: Sequence[Fault], record: Record) -> list[Fault]:
    """Return the faults whose effect was seen less often than planned."""
    times = Counter(span.name for span in record.spans if span.is_seen)
    return [fault for fault in faults if times[fault.name] < record.plan.times]


async def _inject(group: Sequence[Fault], world: World) -> float:
    """Inject faults together. Returns the seconds from their end until latencies were low again."""
    longest_delay = 1.0 if len(group) > 1 else 0.0
    async with asyncio.TaskGroup() as together:
        for fault in group:
            together.create_task(fault.happen(world, world.chance.uniform(0.0, longest_delay)))
    end = time.monotonic()
    seconds = max(60.0, world.record.plan.recovery)
    await until(lambda: recovered_after(world.record, end), seconds=seconds)
    recovered = (recovered_after(world.record, end) or time.monotonic()) - end
    world.record.recoveries.append(([fault.name for fault in group], recovered))
    return recovered


def recovered_after(record: Record, end: float) -> float | None:
    """Return when, after *end*, the latency from commit to auditor fell below a second for good, if it has.

    So many in a row must show it that each relay has probably published some.
    """
    now = time.monotonic()
    # An event may come before its create is acknowledged, by 20 s of repeats.
    recent = takewhile(lambda arrival: arrival.at > end - 30.0, reversed(record.arrivals))
    arrived = {arrival.key: arrival.at for arrival in recent if arrival.type == Event.CREATED}
    commits = [*takewhile(lambda item: item[1] >= end, reversed(record.acknowledged.items()))]
    in_time: list[float] = []
    for key, committed in reversed(commits):
        if arrived.get(key, now) - committed >= 1.0:
            in_time = []
        elif key not in arrived:
            return None  # It is too early to know.
        else:
            in_time.append(committed)
        if len(in_time) == 16:
            return in_time[0]
    return None


def rounds(faults: Sequence[Fault], chance: random.Random) -> Iterator[list[Fault]]:
    """Yield groups without end. Each round has every fault once: first mixed, then alone, and so on."""
    while True:
        yield from mixed(faults, chance)
        yield from ([fault] for fault in chance.sample(faults, k=len(faults)))


def mixed(faults: Sequence[Fault], chance: random.Random) -> list[list[Fault]]:
    """Return groups of faults to inject together, none of which touch the same thing."""
    groups: list[list[Fault]] = []
    for fault in chance.sample(faults, k=len(faults)):
        for group in groups:
            if len(group) < 3 and all(fault.touches.isdisjoint(other.touches) for other in group):
                group.append(fault)
                break
        else:
            groups.append([fault])
    return groups


if __name__ == "__main__":
    sys.exit(main())
