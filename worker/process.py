"""Assembles the parts of a worker and runs them until SIGTERM. See Shutdown in deploy/operate.md."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import cast

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
from worker.settings import EmailSettings, WorkerSettings
from worker.waiting import Pauses

ROLES = ("relay", "notifications", "calculations")

_log = structlog.get_logger()

Part = Callable[[asyncio.Event], Coroutine[None, None, None]]  # runs until the event is set
Reading = Callable[[Connection], Awaitable[None]]  # sets the gauges of a role


class Worker:
    """The parts of *roles*, their readiness checks, and the function that reads their gauges."""

    def __init__(
        self, settings: WorkerSettings, pool: Pool, roles: frozenset[str], relay_waker: RelayWaker
    ) -> None:
        seconds = settings.database_timeout_seconds
        readings: list[Reading] = []
        self.parts: dict[str, Part] = {}
        self.checks: dict[str, Check] = {"postgres": partial(schema.check_ready, pool, seconds=seconds)}
        self.read_gauges = partial(read_gauges, pool, readings, seconds=seconds)
        if "relay" in roles:
            woken = asyncio.Event()
            relay = Relay(settings, pool, woken)
            self.parts["relay"] = relay.run
            self.parts["listener"] = partial(listener.run, settings, woken)
            self.parts["discrepancies"] = partial(reconciliation.run, pool)
            if settings.retention_days is not None:
                self.parts["retention"] = partial(retention.run, settings, pool, relay_waker)
            self.checks["relay"] = relay.check
            readings.append(pointers.read_gauges)
        if "notifications" in roles:
            wake = asyncio.Event()
            notification_consumer = notifications.consumer(settings, pool, wake)
            self.parts["notifications"] = notification_consumer.run
            email_settings = cast("EmailSettings", settings)  # `__main__` loads them for this role.
            self.parts["emails"] = Postman(email_settings, pool, wake, relay_waker).run
            self.checks["notifications"] = notification_consumer.check
            readings.append(ledger.read_gauges)
            if email_settings.bounces_url is not None:
                from worker.mail import bounces

                self.parts["bounces"] = bounces.BounceReader(email_settings, pool, relay_waker).run
        if "calculations" in roles:
            calculation_consumer = calculations.consumer(settings, pool, relay_waker)
            self.parts["calculations"] = calculation_consumer.run
            self.checks["calculations"] = calculation_consumer.check


async def run(settings: WorkerSettings, roles: frozenset[str], probes: Address, stop: asyncio.Event) -> None:
    """Run *roles* until *stop*. Then let each finish its work in progress.

    Consumers and the postman take at most a share of SHUTDOWN_SECONDS. A relay ends its pass, which has a
    deadline of its own.
    """
    async with open_pool(settings) as pool:
        relay_waker = RelayWaker(pool, seconds=settings.work_timeout_seconds)
        worker = Worker(settings, pool, roles, relay_waker)
        serving = server_probes.serving(worker.checks, probes, stop, worker.read_gauges)
        async with serving, in_background("relay_waker", relay_waker.run), asyncio.TaskGroup() as running:
            await _wait_for_schema(worker.checks["postgres"], stop)
            if not stop.is_set():
                for name, part in worker.parts.items():
                    running.create_task(keep_running(name, partial(part, stop)))
                _log.info("worker_started", roles=sorted(roles))
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
