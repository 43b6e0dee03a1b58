"""One run: start everything, inject faults under load, let the system drain, take stock."""

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import takewhile
from pathlib import Path

import msgspec

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import LOCAL as LOCAL_OF_CHECKOUT
from deploy.local.machine.folders import Place, Report, working_folder
from tests.faults.catalogue.fault import CLOCKS, CLUSTER_FAULTS, FAULTS, Fault
from tests.faults.verdict.records import CREATED, Record
from tests.faults.verdict.stocktaking import drained, take_stock
from tests.faults.world import stage
from tests.faults.world.world import World
from tests.harness.programs import variables_of_clock
from tests.harness.servers import Servers, private_servers
from tests.harness.waiting import until

LOCAL = LOCAL_OF_CHECKOUT / "faults"
_CALM_SECONDS = 4.0  # under load, before the first fault and after the last
_PAUSE_SECONDS = 0.5  # between two faults
_STAGGER_SECONDS = 1.0  # between faults that are mixed
_GIVE_UP_SECONDS = 60.0  # waiting for a recovery, unless more is allowed
_AT_ONCE = 3  # faults
_OVERTIME = 2.5  # of the planned seconds, for the faults and requests that are still missing
_BEYOND_STALLS_SECONDS = 17.0  # a claim lasts longer than Postgres is unreachable, by the waits of a sender
_LATENCY_SECONDS = 1.0  # from a commit to the auditor
_IN_A_ROW = 16  # latencies, so that each relay has probably published some
_EARLY_SECONDS = 30.0  # an event may come that long before its create is acknowledged: repeats take 20


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long a run is, and what happens in it, as the command line says."""

    seconds: float
    requests: int
    times: int  # for each fault, at least
    rate: float
    seed: int
    broken: str | None
    cluster: bool  # of three nodes of RabbitMQ, and a pair of Postgres
    faults: Sequence[str]  # the names of those to inject; all if empty
    longest_stall: float  # in seconds, as are the next two
    recovery: float
    drain: float


async def run(plan: Plan, report: Report) -> Record:
    """Return the record of a run. The logs of the processes are kept, of the last run only."""
    claim_seconds = plan.longest_stall + _BEYOND_STALLS_SECONDS
    record = Record(email_claim_seconds=claim_seconds, recovery_bar_seconds=plan.recovery)
    chance = random.Random(plan.seed)  # noqa: S311 - repeatable, no secret
    place = Place(folder=LOCAL, report=report)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(working_folder(place, "run"))
        # Broken programs may run at the same time.
        stack.callback(_keep_logs, folder, LOCAL / "logs" / (plan.broken or "working"))
        if plan.cluster:
            servers: Servers = await stack.enter_async_context(stage.clustered_servers(report))
        else:
            servers = stack.enter_context(private_servers(place))
        async with stage.started(
            servers, record, folder, chance, broken=plan.broken, longest_stall=plan.longest_stall
        ) as world:
            await _live(plan, world, report)
            report("no more load, no more faults: draining …")
            if left := await drained(world, seconds=plan.drain):
                report(f"not drained after {plan.drain:.0f} s: {left}")
            await asyncio.gather(*(worker.leave() for worker in world.workers))
            await take_stock(world)
    return record


def _keep_logs(folder: Path, logs: Path) -> None:
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    for log in folder.glob("*.log"):
        shutil.move(log, logs)


async def _live(plan: Plan, world: World, report: Report) -> None:
    """Put load on the system, and inject faults until the plan is fulfilled."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(world.callers.run(plan.rate, stop))
        began = time.monotonic()
        try:
            await asyncio.sleep(_CALM_SECONDS)
            await _inject_all(plan, world, report)
            await asyncio.sleep(_CALM_SECONDS)
        finally:
            world.record.seconds = time.monotonic() - began
            stop.set()


async def _inject_all(plan: Plan, world: World, report: Report) -> None:
    """Inject one round in a cluster, else rounds until the plan is fulfilled or its overtime is over."""
    faults = CLUSTER_FAULTS if plan.cluster else FAULTS
    faults = _possible([fault for fault in faults if not plan.faults or fault.name in plan.faults], report)
    record = world.record
    began = time.monotonic()
    for group in mixed(faults, world.chance) if plan.cluster else rounds(faults, world.chance):
        elapsed = time.monotonic() - began
        is_fulfilled = elapsed >= plan.seconds and not any(shortfalls_of(plan, faults, record))
        if is_fulfilled or elapsed >= plan.seconds * _OVERTIME + 60:
            break
        missing = _missing(plan, faults, record) if elapsed >= plan.seconds else []
        if due := [fault for fault in group if fault in missing or not missing]:
            names = " + ".join(fault.name for fault in due)
            seconds = await _inject(due, world)
            unseen = [f", {span.fault} not seen" for span in record.spans[-len(due) :] if not span.is_seen]
            done = f"{elapsed:7.1f} s  {len(record.acknowledged):7} requests  recovered in {seconds:5.2f} s"
            report(f"{done} from {names}{''.join(unseen)}")
            await asyncio.sleep(_PAUSE_SECONDS)
    record.shortfalls += shortfalls_of(plan, faults, record)


def _possible(faults: list[Fault], report: Report) -> list[Fault]:
    """Leave out the faults of clocks, and say so, on a machine without libfaketime."""
    others = [fault for fault in faults if CLOCKS not in fault.touches]
    try:
        if others != faults:
            variables_of_clock(0)
    except LocalStackError as reason:
        report(f"left out the faults of clocks: {reason}")
        return others
    return faults


def shortfalls_of(plan: Plan, faults: Sequence[Fault], record: Record) -> Iterator[str]:
    """Yield what the plan asks for and has not happened yet."""
    most = max(plan.requests, 1)
    if len(record.acknowledged) < most:
        yield f"{len(record.acknowledged)} requests were acknowledged, not {most}"
    for fault in _missing(plan, faults, record):
        yield f"{fault.name}: not seen {plan.times} times"


def _missing(plan: Plan, faults: Sequence[Fault], record: Record) -> list[Fault]:
    """Return the faults whose effect was seen less often than planned."""
    times = Counter(span.fault for span in record.spans if span.is_seen)
    return [fault for fault in faults if times[fault.name] < plan.times]


async def _inject(group: Sequence[Fault], world: World) -> float:
    """Inject faults together. Returns the seconds from their end until latencies were low again."""

    async def happen(fault: Fault, delay: float) -> None:
        await asyncio.sleep(delay)
        await fault.happen(world)

    longest_delay = _STAGGER_SECONDS if len(group) > 1 else 0.0
    async with asyncio.TaskGroup() as together:
        for fault in group:
            together.create_task(happen(fault, world.chance.uniform(0.0, longest_delay)))
    end = time.monotonic()
    seconds = max(_GIVE_UP_SECONDS, world.record.recovery_bar_seconds)
    await until(lambda: recovered_after(world.record, end), seconds=seconds)
    recovered = (recovered_after(world.record, end) or time.monotonic()) - end
    world.record.recoveries.append(([fault.name for fault in group], recovered))
    return recovered


def recovered_after(record: Record, end: float) -> float | None:
    """Return when, after *end*, latencies fell below the bar for good; None while they have not."""
    now = time.monotonic()
    recent = takewhile(lambda arrival: arrival.at > end - _EARLY_SECONDS, reversed(record.arrivals))
    arrived = {arrival.key: arrival.at for arrival in recent if arrival.type == CREATED}
    commits = [*takewhile(lambda item: item[1] >= end, reversed(record.acknowledged.items()))]
    in_time: list[float] = []
    for key, committed in reversed(commits):
        if arrived.get(key, now) - committed >= _LATENCY_SECONDS:
            in_time = []
        elif key not in arrived:
            return None  # It is too early to know.
        else:
            in_time.append(committed)
        if len(in_time) == _IN_A_ROW:
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
            if len(group) < _AT_ONCE and all(fault.touches.isdisjoint(other.touches) for other in group):
                group.append(fault)
                break
        else:
            groups.append([fault])
    return groups
