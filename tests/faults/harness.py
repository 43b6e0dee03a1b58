"""One run: start everything, do harm under load, let the system drain, write down what is there then."""

import asyncio
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import asyncpg
import httpx
import msgspec
from aio_pika.abc import AbstractChannel

from deploy.local.machine.folders import CHECKOUT, Place, working_folder
from service.identifiers import uuid_of
from service.postgres import outages
from service.postgres import pool as postgres
from service.postgres.pool import Connection
from service.server.background import in_background
from service.settings import Settings
from tests.faults import own_queues, workers
from tests.faults.auditor import Auditor
from tests.faults.callers import Callers
from tests.faults.faults import FAULTS, Fault
from tests.faults.latency import Latencies
from tests.faults.load import Load
from tests.faults.mail import REFUSED_RECIPIENT, MailServer
from tests.faults.records import CREATED, Arrival, Held, Record, Recovery, Stored
from tests.faults.schedule import rounds
from tests.faults.team import Team
from tests.faults.workers import APIS, CALCULATORS, NOTIFIERS, RELAYS, Command, Worker
from tests.faults.world import World, connect, writable
from tests.harness import databases, queues
from tests.harness.examples import SECRET_KEYS
from tests.harness.issuer import AUDIENCE, ISSUER, Issuer
from tests.harness.servers import Servers, private_servers
from tests.harness.waiting import until
from worker.rabbitmq import topology

LOCAL = CHECKOUT / ".local" / "faults"

_CALM_SECONDS = 4.0  # under load, before the first fault and after the last
_PAUSE_SECONDS = 0.5  # between two faults
_STAGGER_SECONDS = 1.0  # between faults that come together
_GIVE_UP_SECONDS = 60.0  # waiting for a recovery
_OVERTIME = 1.5  # of the seconds asked for, to get every fault and request in
_TOKEN_SECONDS = 24 * 3600
_SUSPICIOUS = (
    '"event": "message_failed"',
    '"event": "email_failed"',
    '"event": "email_recording_failed"',
    '"event": "worker_failed"',
    '"event": "background_work_failed"',
    "Traceback",
    "Task exception was never retrieved",
    "Task was destroyed",
    "Exception in callback",
    "Unhandled",
)

Report = Callable[[str], None]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long a run is, and what happens in it."""

    seconds: float
    requests: int
    times: int  # for each fault, at least
    rate: float
    http_share: float
    seed: int
    broken: str | None
    faults: Sequence[str]  # of these names; all when there is none
    longest_stall_seconds: float
    recovery_bar_seconds: float
    drain_seconds: float

    @property
    def email_claim_seconds(self) -> float:
        """Longer than Postgres is out of reach, with all that a sender waits for afterwards."""
        return self.longest_stall_seconds + 17.0


async def run(plan: Plan, report: Report) -> Record:
    """Carry out a plan and return the record of it."""
    record = Record(
        relays=len(RELAYS),
        email_claim_seconds=plan.email_claim_seconds,
        recovery_bar_seconds=plan.recovery_bar_seconds,
    )
    chance = random.Random(plan.seed)  # noqa: S311 - to be repeated, not to keep a secret
    place = Place(folder=LOCAL, keep=False, report=report)
    with working_folder(place, "run") as folder, _logs_kept(folder), private_servers(place) as servers:
        await _prepare(servers)
        async with _started(plan, record, servers, folder, chance) as (world, latencies, apis, auditor):
            await _live(plan, record, world, latencies, apis, report)
            await _drain(plan, record, world, report)
            await asyncio.gather(*(worker.end() for worker in world.workers))
            await _take_stock(record, world)
            record.arrivals = auditor.arrivals
            record.acceptances = world.mail.acceptances
            record.latencies = latencies.summary()
    return record


@contextmanager
def _logs_kept(folder: Path) -> Iterator[None]:
    """Keep what our processes have written, of the last run only."""
    try:
        yield
    finally:
        logs = LOCAL / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        for log in folder.glob("*.log"):
            shutil.move(log, logs)


async def _prepare(servers: Servers) -> None:
    connection = await connect(servers.postgres.url)
    await databases.prepare(connection)
    await connection.close()
    async with queues.open_channel(servers.broker.url) as channel:
        await own_queues.declare(channel)


@asynccontextmanager
async def _started(
    plan: Plan, record: Record, servers: Servers, folder: Path, chance: random.Random
) -> AsyncIterator[tuple[World, Latencies, list[httpx.AsyncClient], Auditor]]:
    """Start all that surrounds the load: auditor, team, mail server, snapshot, our processes."""
    latencies = Latencies()

    def watch(arrival: Arrival) -> None:
        if arrival.type == CREATED and not arrival.redelivered:
            latencies.heard(arrival.key, arrival.at)

    issuer = Issuer(folder)
    auditor = Auditor(servers.broker.url, watch)
    async with AsyncExitStack() as stack:
        mail = await stack.enter_async_context(MailServer(NOTIFIERS, chance))
        hold_snapshot = partial(_hold_snapshot, servers.postgres.url)
        for work in (auditor.run, Team(servers.broker.url).run, hold_snapshot):
            await stack.enter_async_context(in_background("harness", work))
        started = await stack.enter_async_context(
            workers.started(
                list(_commands(plan, mail, issuer)),
                record,
                folder,
                database_url=servers.postgres.url,
                amqp_url=servers.broker.url,
            )
        )
        for worker in started:
            await stack.enter_async_context(in_background("harness", worker.watch))
        token = issuer.token(exp=int(time.time()) + _TOKEN_SECONDS)
        apis = [
            await stack.enter_async_context(_client(worker.process.base_url, token))
            for worker in started
            if worker.name in APIS
        ]
        world = World(
            servers=servers,
            workers=started,
            mail=mail,
            callers=Callers(record, latencies, apis, random.Random(plan.seed + 2)),  # noqa: S311 - likewise
            record=record,
            chance=chance,
            longest_stall_seconds=plan.longest_stall_seconds,
        )
        yield world, latencies, apis, auditor


def _client(base_url: str, token: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {token}"}, timeout=5.0)


def _commands(plan: Plan, mail: MailServer, issuer: Issuer) -> Iterable[Command]:
    shared = {"APP_URL": "https://app.example.com", "REQUEST_SECRET_KEYS": SECRET_KEYS}
    broken = [] if plan.broken is None else ["tests.faults.broken_relay", plan.broken]
    for name in APIS:
        yield Command(
            name=name,
            arguments=["-m", *broken, "service", "serve"],
            environment={
                **shared,
                "AUTH_ISSUER": ISSUER,
                "AUTH_AUDIENCE": AUDIENCE,
                "AUTH_JWKS_URL": issuer.jwks.as_uri(),
            },
            port_variable="PORT",
        )
    for name in (*RELAYS, *NOTIFIERS, *CALCULATORS):
        yield Command(
            name=name,
            arguments=["-m", *broken, "worker", name.partition("-")[0]],
            environment={
                **shared,
                "SMTP_URL": mail.url_for(name if name in NOTIFIERS else NOTIFIERS[0]),
                "MAIL_FROM": "Calculations <calculations@service.example.com>",
                "EMAIL_CLAIM_SECONDS": str(plan.email_claim_seconds),
                **_SOONER,
            },
            port_variable="HEALTH_PORT",
        )


# The defaults but for the longest pauses between retries, which would outlast the run.
_SOONER: Mapping[str, str] = {
    "RELAY_LONGEST_RETRY_SECONDS": "2",
    "EMAIL_RETRY_SECONDS": "1",
    "EMAIL_LONGEST_RETRY_SECONDS": "4",
}


async def _hold_snapshot(url: str) -> None:
    """Keep a transaction open that sees the database as it was, and another when Postgres was away."""
    while True:
        with suppress(*outages.UNAVAILABLE, asyncpg.PostgresError):
            connection = await asyncpg.connect(url, timeout=5.0, command_timeout=10.0)
            try:
                async with connection.transaction(isolation="repeatable_read"):
                    while True:
                        await connection.fetchval("SELECT count(*) FROM conveyancer")
                        await asyncio.sleep(5.0)
            finally:
                connection.terminate()
        await asyncio.sleep(0.2)


async def _live(
    plan: Plan,
    record: Record,
    world: World,
    latencies: Latencies,
    apis: Sequence[httpx.AsyncClient],
    report: Report,
) -> None:
    """Put load on the system and do it harm until the plan is fulfilled."""
    stop = asyncio.Event()
    settings = Settings(
        database_url=writable(world.servers.postgres.url),
        app_url="https://app.example.com",
        request_secret_keys=SECRET_KEYS,
        database_pool_size=16,
        database_timeout_seconds=2.0,
    )
    async with postgres.open_pool(settings) as pool, asyncio.TaskGroup() as group:
        load = Load(
            record,
            latencies,
            pool,
            apis,
            rate=plan.rate,
            http_share=plan.http_share,
            chance=random.Random(plan.seed + 1),  # noqa: S311 - its pace must not change the faults
        )
        group.create_task(load.run(stop))
        group.create_task(world.callers.run(stop))
        began = time.monotonic()
        try:
            await asyncio.sleep(_CALM_SECONDS)
            await _harm(plan, world, latencies, report)
            await asyncio.sleep(_CALM_SECONDS)
        finally:
            record.seconds = time.monotonic() - began
            stop.set()


async def _harm(plan: Plan, world: World, latencies: Latencies, report: Report) -> None:
    faults = [fault for fault in FAULTS if not plan.faults or fault.name in plan.faults]
    began = time.monotonic()
    done = dict.fromkeys((fault.name for fault in faults), 0)
    for round_ in rounds(faults, world.chance):
        for group in round_:
            elapsed = time.monotonic() - began
            shortfalls = list(_shortfalls(plan, done, len(world.record.acknowledged)))
            if (elapsed >= plan.seconds and not shortfalls) or elapsed >= plan.seconds * _OVERTIME + 60:
                world.record.shortfalls += shortfalls
                return
            await _inject(group, world, latencies)
            for fault in group:
                done[fault.name] += 1
            last = world.record.recoveries[-1]
            report(
                f"{elapsed:7.1f} s  {len(world.record.acknowledged):7} requests  "
                f"recovered in {last.seconds:5.2f} s from {' + '.join(last.faults)}"
            )
            await asyncio.sleep(_PAUSE_SECONDS)


def _shortfalls(plan: Plan, done: Mapping[str, int], acknowledged: int) -> Iterator[str]:
    if acknowledged < plan.requests:
        yield f"{acknowledged} requests were acknowledged, not {plan.requests}"
    for fault, times in done.items():
        if times < plan.times:
            yield f"{fault}: injected {times} times, not {plan.times}"


async def _inject(group: Sequence[Fault], world: World, latencies: Latencies) -> None:
    """Have faults happen together, and wait for the system to recover from the last."""
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
        recovered = latencies.recovered_after(end)
    seconds = (time.monotonic() if recovered is None else recovered) - end
    world.record.recoveries.append(Recovery(tuple(fault.name for fault in group), seconds))


async def _drain(plan: Plan, record: Record, world: World, report: Report) -> None:
    """Wait until nothing moves any more, with a bound: what is missing then, the invariants tell."""
    report("no more load, no more faults: draining …")
    connection = await connect(world.servers.postgres.url)

    async def is_drained() -> bool:
        return not any((await _unfinished(connection)).values())

    try:
        if not await until(is_drained, seconds=plan.drain_seconds, pause_seconds=0.25):
            report(f"not drained after {plan.drain_seconds:.0f} s: {await _unfinished(connection)}")
    finally:
        await connection.close()
    # The last events may still be on their way to the auditor, poison still on its way to the dead letters.
    async with queues.open_channel(world.servers.broker.url) as channel:
        await until(lambda: _nothing_waits(channel, record), seconds=plan.drain_seconds, pause_seconds=0.25)


async def _unfinished(connection: Connection) -> dict[str, int]:
    row = await connection.fetchrow(
        """
        SELECT (SELECT count(*) FROM outbox) AS outbox,
               (SELECT count(*)
                  FROM outbox_held AS held
                 WHERE parked_at IS NULL
                   AND NOT EXISTS (SELECT
                                     FROM outbox_held AS earlier
                                    WHERE earlier.request_id = held.request_id
                                      AND earlier.id < held.id
                                      AND earlier.parked_at IS NOT NULL)) AS held,
               (SELECT count(*) FROM email WHERE state = 'pending') AS emails,
               (SELECT count(*) FROM calculation_request WHERE sequence < 3) AS requests
        """
    )
    return dict(row) if row else {}


async def _nothing_waits(channel: AbstractChannel, record: Record) -> bool:
    names = [own_queues.AUDITOR, own_queues.TEAM]
    names += [queue.name for queue in (topology.NOTIFICATIONS, topology.CALCULATION_RESULTS)]
    waiting = [await queues.count(channel, name) for name in names]
    dead = [
        await queues.count(channel, queue.dead_letters)
        for queue in (topology.NOTIFICATIONS, topology.CALCULATION_RESULTS)
    ]
    return not any(waiting) and sum(dead) >= len(record.poison_messages)


async def _take_stock(record: Record, world: World) -> None:
    """Write down what is in the tables, in the queues of dead letters and in the logs at the end."""
    connection = await connect(world.servers.postgres.url)
    rows = await connection.fetch(
        "SELECT id, external_id, customer_email, calculation_id FROM calculation_request"
    )
    record.stored = [
        Stored(
            row["external_id"],
            uuid_of(row["id"]),
            row["customer_email"],
            row["calculation_id"],
            row["customer_email"].encode().startswith(REFUSED_RECIPIENT),
        )
        for row in rows
    ]
    record.outbox_left = await connection.fetchval("SELECT count(*) FROM outbox")
    held = await connection.fetch("SELECT request_id, type, parked_at FROM outbox_held")
    record.held = [
        Held(f"{uuid_of(row['request_id'])} {row['type']}", row["parked_at"] is not None) for row in held
    ]
    await connection.close()
    async with queues.open_channel(world.servers.broker.url) as channel:
        record.dead_letters = [
            message
            for queue in (topology.NOTIFICATIONS, topology.CALCULATION_RESULTS)
            for message in await _dead_letters(channel, queue)
        ]
    record.log_lines = [line for worker in world.workers for line in suspicious_lines(worker)]


async def _dead_letters(channel: AbstractChannel, queue: topology.Queue) -> list[str]:
    graveyard = await channel.get_queue(queue.dead_letters, ensure=False)
    found = []
    while (message := await graveyard.get(no_ack=True, fail=False)) is not None:
        found.append(f"{queue.name} {message.message_id}")
    return found


def suspicious_lines(worker: Worker) -> Iterable[str]:
    """Return the lines of a log that tell of an exception which nobody expected."""
    with worker.process.log.open(errors="replace") as lines:
        for line in lines:
            if any(word in line for word in _SUSPICIOUS):
                yield f"{worker.name}: {line.strip()[:400]}"
