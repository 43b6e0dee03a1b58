"""One run: start everything, inject faults under load, let the system drain, take stock."""

import asyncio
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deploy.local.machine.folders import Place, Report, working_folder
from service.postgres import pool as postgres
from service.settings import Settings
from tests.faults.catalogue.fault import FAULTS, Fault
from tests.faults.plan import LOCAL, Plan
from tests.faults.schedule import rounds
from tests.faults.verdict.records import Record, Recovery
from tests.faults.verdict.stocktaking import drained, take_stock
from tests.faults.world import stage as stages
from tests.faults.world.load import Load
from tests.faults.world.stage import Stage
from tests.faults.world.workers import RELAYS
from tests.faults.world.world import writable
from tests.harness.examples import SECRET_KEYS
from tests.harness.servers import private_servers

_CALM_SECONDS = 4.0  # under load, before the first fault and after the last
_PAUSE_SECONDS = 0.5  # between two faults
_STAGGER_SECONDS = 1.0  # between faults that are mixed
_GIVE_UP_SECONDS = 60.0  # waiting for a recovery
_OVERTIME = 1.5  # of the planned seconds, for the faults and requests that are still missing


async def run(plan: Plan, report: Report) -> Record:
    """Carry out a plan and return the record of it."""
    record = Record(
        relays=len(RELAYS),
        email_claim_seconds=plan.email_claim_seconds,
        recovery_bar_seconds=plan.recovery_bar_seconds,
    )
    chance = random.Random(plan.seed)  # noqa: S311 - repeatable, no secret
    place = Place(folder=LOCAL, keep=False, report=report)
    with working_folder(place, "run") as folder, _logs_kept(folder), private_servers(place) as servers:
        await stages.prepare(servers)
        async with stages.started(plan, record, servers, folder, chance) as stage:
            await _live(plan, stage, report)
            report("no more load, no more faults: draining …")
            if left := await drained(stage.world, seconds=plan.drain_seconds):
                report(f"not drained after {plan.drain_seconds:.0f} s: {left}")
            await asyncio.gather(*(worker.end() for worker in stage.world.workers))
            await take_stock(stage.world)
            record.arrivals = stage.auditor.arrivals
            record.acceptances = stage.world.mail.acceptances
            record.latencies = stage.latencies.summary()
    return record


@contextmanager
def _logs_kept(folder: Path) -> Iterator[None]:
    """Keep the logs of the processes, of the last run only."""
    try:
        yield
    finally:
        logs = LOCAL / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        for log in folder.glob("*.log"):
            shutil.move(log, logs)


async def _live(plan: Plan, stage: Stage, report: Report) -> None:
    """Put load on the system, and inject faults until the plan is fulfilled."""
    stop = asyncio.Event()
    settings = Settings(
        database_url=writable(stage.world.servers.postgres.url),
        app_url="https://app.example.com",
        request_secret_keys=SECRET_KEYS,
        database_pool_size=16,
        database_timeout_seconds=2.0,
    )
    async with postgres.open_pool(settings) as pool, asyncio.TaskGroup() as group:
        load = Load(
            stage.world.record,
            stage.latencies,
            pool,
            stage.apis,
            rate=plan.rate,
            chance=random.Random(plan.seed + 1),  # noqa: S311 - its pace must not change the faults
        )
        group.create_task(load.run(stop))
        group.create_task(stage.world.callers.run(stop))
        began = time.monotonic()
        try:
            await asyncio.sleep(_CALM_SECONDS)
            await _inject_all(plan, stage, report)
            await asyncio.sleep(_CALM_SECONDS)
        finally:
            stage.world.record.seconds = time.monotonic() - began
            stop.set()


async def _inject_all(plan: Plan, stage: Stage, report: Report) -> None:
    """Inject round after round until the plan is fulfilled, or its overtime is over."""
    faults = [fault for fault in FAULTS if not plan.faults or fault.name in plan.faults]
    record = stage.world.record
    began = time.monotonic()
    done = dict.fromkeys((fault.name for fault in faults), 0)
    for round_ in rounds(faults, stage.world.chance):
        for group in round_:
            elapsed = time.monotonic() - began
            shortfalls = list(plan.shortfalls(done, len(record.acknowledged)))
            if (elapsed >= plan.seconds and not shortfalls) or elapsed >= plan.seconds * _OVERTIME + 60:
                record.shortfalls += shortfalls
                return
            await _inject(group, stage)
            for fault in group:
                done[fault.name] += 1
            last = record.recoveries[-1]
            report(
                f"{elapsed:7.1f} s  {len(record.acknowledged):7} requests  "
                f"recovered in {last.seconds:5.2f} s from {' + '.join(last.faults)}"
            )
            await asyncio.sleep(_PAUSE_SECONDS)


async def _inject(group: Sequence[Fault], stage: Stage) -> None:
    """Inject faults together, and wait for the system to recover from the last."""
    world = stage.world
    delays = [world.chance.uniform(0.0, _STAGGER_SECONDS) if len(group) > 1 else 0.0 for _ in group]

    async def happen(fault: Fault, delay: float) -> None:
        await asyncio.sleep(delay)
        await fault.happen(world)

    async with asyncio.TaskGroup() as together:
        for fault, delay in zip(group, delays, strict=True):
            together.create_task(happen(fault, delay))
    end = time.monotonic()
    recovered: float | None = None
    while recovered is None and time.monotonic() < end + _GIVE_UP_SECONDS:
        await asyncio.sleep(0.05)
        recovered = stage.latencies.recovered_after(end)
    seconds = (time.monotonic() if recovered is None else recovered) - end
    world.record.recoveries.append(Recovery(tuple(fault.name for fault in group), seconds))
