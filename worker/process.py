"""The roles of a worker, each declared once, and their process. See Shutdown in deploy/operate.md."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import structlog

from service.outbox.waking import RelayWaker
from service.postgres import connections, schema
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool, open_pool
from service.postgres.schema import SchemaOutdated
from service.server import probes as server_probes
from service.server.background import in_background, keep_running
from service.server.http_server import Address
from service.server.probes import Check
from worker import metrics, reconciliation, retention
from worker.consumers import calculations, notifications
from worker.mail import ledger
from worker.mail.postman import Postman
from worker.relay import listener, pointers
from worker.relay.loop import Relay
from worker.settings import EmailSettings, ProcessSettings, WorkerSettings
from worker.waiting import Pauses

_log = structlog.get_logger()

Part = Callable[[asyncio.Event], Coroutine[None, None, None]]  # runs until the event is set
Reading = Callable[[Connection], Awaitable[None]]  # sets gauges
Work = tuple[dict[str, Part], Check, list[Reading]]  # what runs in a role, and its readiness check


class Role(NamedTuple):
    """A role: what runs in it, the settings that it loads, and what its pods reach and show."""

    assemble: Callable[..., Work]  # of its settings, the pool and the waker of relays
    settings: type[ProcessSettings]
    liveness: str  # a series that exists as long as a process runs this role
    servers: Collection[str]  # besides Postgres; the names are those of tests/deploy/test_network_policy.py


def _relay(settings: WorkerSettings, pool: Pool, relay_waker: RelayWaker) -> Work:
    woken = asyncio.Event()
    relay = Relay(settings, pool, woken)
    parts: dict[str, Part] = {"relay": relay.run, "listener": partial(listener.run, settings, woken)}
    parts["discrepancies"] = partial(reconciliation.run, pool)
    if settings.retention_days is not None:
        parts["retention"] = partial(retention.run, settings, pool, relay_waker)
    return parts, relay.check, [pointers.read_gauges]


def _notifications(settings: EmailSettings, pool: Pool, relay_waker: RelayWaker) -> Work:
    wake = asyncio.Event()
    consumer = notifications.consumer(settings, pool, wake)
    emails = Postman(settings, pool, wake, relay_waker)
    parts: dict[str, Part] = {"notifications": consumer.run, "emails": emails.run}
    if settings.bounces_url is not None:
        from worker.mail import bounces

        parts["bounces"] = partial(bounces.run, settings, pool, relay_waker)
    return parts, consumer.check, [ledger.read_gauges]


def _calculations(settings: WorkerSettings, pool: Pool, relay_waker: RelayWaker) -> Work:
    consumer = calculations.consumer(settings, pool, relay_waker)
    return {"calculations": consumer.run}, consumer.check, []


# Tests hold manifests, network policies, alerts and pages against this declaration.
ROLES = {
    "relay": Role(
        _relay,
        WorkerSettings,
        liveness='broker_connected{connection="relay"}',
        servers=("rabbitmq", "direct postgres"),
    ),
    "notifications": Role(
        _notifications,
        EmailSettings,
        liveness='consumer_reading{queue="notifications"}',
        servers=("rabbitmq", "mail server", "mailbox", "https"),
    ),
    "calculations": Role(
        _calculations,
        WorkerSettings,
        liveness='consumer_reading{queue="calculation-results"}',
        servers=("rabbitmq",),
    ),
}


async def run(settings: Mapping[str, ProcessSettings], probes: Address, stop: asyncio.Event) -> None:
    """Run the roles that *settings* names, until *stop*. Then let each finish its work in progress.

    Consumers and the postman take at most a share of SHUTDOWN_SECONDS. A relay ends its pass, which has a
    deadline of its own.
    """
    of_process = next(iter(settings.values()))  # What all roles need is the same for each.
    seconds = of_process.database_timeout_seconds
    async with open_pool(of_process) as pool:
        relay_waker = RelayWaker(pool, seconds=of_process.work_timeout_seconds)
        parts: dict[str, Part] = {}
        checks: dict[str, Check] = {"postgres": partial(schema.check_ready, pool, seconds=seconds)}
        readings: list[Reading] = []
        for name, own in settings.items():
            of_role, checks[name], gauges = ROLES[name].assemble(own, pool, relay_waker)
            parts |= of_role
            readings += gauges
        read = partial(read_gauges, pool, readings, seconds=seconds)
        serving = server_probes.serving(checks, probes, stop, read)
        async with serving, in_background("relay_waker", relay_waker.run), asyncio.TaskGroup() as running:
            await _wait_for_schema(checks["postgres"], stop)
            if not stop.is_set():
                for name, part in parts.items():
                    running.create_task(keep_running(name, partial(part, stop)))
                _log.info("worker_started", roles=sorted(settings))
                await stop.wait()
            _log.info("worker_stopping")
    _log.info("worker_stopped")


async def read_gauges(pool: Pool, readings: Sequence[Reading], *, seconds: float) -> None:
    """Update the gauges from Postgres. They are NaN while it is unavailable or has no schema."""
    try:
        async with connections.acquired(pool, seconds=seconds) as connection:
            for reading in readings:
                await reading(connection)
    except PostgresUnavailable:
        for gauge in metrics.FROM_POSTGRES:
            gauge.set(math.nan)


async def _wait_for_schema(check: Check, stop: asyncio.Event) -> None:
    """Repeat *check* until Postgres answers and has the schema that this release needs."""
    pauses = Pauses("worker_waits_for_schema")
    while not stop.is_set():
        try:
            await check()
        except (PostgresUnavailable, SchemaOutdated) as error:
            await pauses.log_and_wait(error, stop)
        else:
            return
