"""One run: start everything, inject faults under load, let the system drain, take stock."""

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import Place, Report, working_folder
from tests.faults.catalogue.fault import CLOCKS, CLUSTER_FAULTS, FAULTS, Fault
from tests.faults.plan import LOCAL, Plan
from tests.faults.verdict.latency import recovered_after
from tests.faults.verdict.records import Record, Recovery
from tests.faults.verdict.stocktaking import drained, take_stock
from tests.faults.world import stage
from tests.faults.world.clustered import clustered_servers
from tests.faults.world.world import World
from tests.harness.programs import variables_of_clock
from tests.harness.servers import Servers, private_servers
from tests.harness.waiting import until

_CALM_SECONDS = 4.0  # under load, before the first fault and after the last
_PAUSE_SECONDS = 0.5  # between two faults
_STAGGER_SECONDS = 1.0  # between faults that are mixed
_GIVE_UP_SECONDS = 60.0  # waiting for a recovery, unless more is allowed
_AT_ONCE = 3  # faults
_OVERTIME = 2.5  # of the planned seconds, for the faults and requests that are still missing


async def run(plan: Plan, report: Report) -> Record:
    record = Record(email_claim_seconds=plan.email_claim_seconds, recovery_bar_seconds=plan.recovery)
    chance = random.Random(plan.seed)  # noqa: S311 - repeatable, no secret
    place = Place(folder=LOCAL, report=report)
    with working_folder(place, "run") as folder, _logs_kept(folder, plan):
        async with AsyncExitStack() as stack:
            if plan.cluster:
                servers: Servers = await stack.enter_async_context(clustered_servers(report))
            else:
                servers = stack.enter_context(private_servers(place))
            await stage.prepare(servers)
            async with stage.started(plan, record, servers, folder, chance) as world:
                await _live(plan, world, report)
                report("no more load, no more faults: draining …")
                if left := await drained(world, seconds=plan.drain):
                    report(f"not drained after {plan.drain:.0f} s: {left}")
                await asyncio.gather(*(worker.leave() for worker in world.workers))
                await take_stock(world)
    return record


@contextmanager
def _logs_kept(folder: Path, plan: Plan) -> Iterator[None]:
    """Keep the logs of the processes, of the last run only. Broken programs may run at the same time."""
    try:
        yield
    finally:
        logs = LOCAL / "logs" / (plan.broken or "working")
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
        missing = [fault for fault in _missing(plan, faults, record) if elapsed >= plan.seconds]
        due = [fault for fault in group if fault in missing or not missing]
        if not due:
            continue
        await _inject(due, world)
        last = record.recoveries[-1]
        unseen = [span.fault for span in record.spans[-len(due) :] if not span.is_seen]
        report(
            f"{elapsed:7.1f} s  {len(record.acknowledged):7} requests  "
            f"recovered in {last.seconds:5.2f} s from {' + '.join(last.faults)}"
            + "".join(f", {fault} not seen" for fault in unseen)
        )
        await asyncio.sleep(_PAUSE_SECONDS)
    record.shortfalls += shortfalls_of(plan, faults, record)


def _possible(faults: list[Fault], report: Report) -> list[Fault]:
    """Leave out the faults of clocks, and say so, on a machine without libfaketime."""
    of_clocks = [fault for fault in faults if CLOCKS in fault.touches]
    try:
        if of_clocks:
            variables_of_clock(0)
    except LocalStackError as reason:
        report(f"left out: {', '.join(fault.name for fault in of_clocks)}: {reason}")
        return [fault for fault in faults if fault not in of_clocks]
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


async def _inject(group: Sequence[Fault], world: World) -> None:
    async def happen(fault: Fault, delay: float) -> None:
        await asyncio.sleep(delay)
        await fault.happen(world)

    async with asyncio.TaskGroup() as together:
        for fault in group:
            delay = world.chance.uniform(0.0, _STAGGER_SECONDS) if len(group) > 1 else 0.0
            together.create_task(happen(fault, delay))
    end = time.monotonic()
    seconds = max(_GIVE_UP_SECONDS, world.record.recovery_bar_seconds)
    await until(lambda: recovered_after(world.record, end), seconds=seconds)
    recovered = recovered_after(world.record, end) or time.monotonic()
    world.record.recoveries.append(Recovery(tuple(fault.name for fault in group), recovered - end))


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
