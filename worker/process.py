"""Assembles a worker from its parts, and runs them until SIGTERM: see Shutdown in deploy/operate.md."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from functools import partial

import structlog

from service.calculation_requests.request_secrets import SecretKeyRing, remember_keys
from service.outbox.lanes import RelayWaker
from service.postgres import connections, schema
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool, open_pool
from service.postgres.schema import SchemaOutdated
from service.server import probes as server_probes
from service.server.background import in_background, keep_running
from service.server.probes import Check, ReadGauges
from worker import gauges, reconciliation
from worker.consumers import calculations, notifications
from worker.gauges import Reading
from worker.mail import ledger
from worker.mail.postman import Postman
from worker.relay import outbox_tables
from worker.relay.listener import Listener
from worker.relay.loop import Relay
from worker.retention import Retention
from worker.settings import WorkerSettings
from worker.waiting import Pauses

ROLES = ("relay", "notifications", "calculations")

_log = structlog.get_logger()

Part = Callable[[asyncio.Event], Coroutine[None, None, None]]  # runs until the event is set


def assemble(
    settings: WorkerSettings, pool: Pool, roles: frozenset[str], relay_waker: RelayWaker
) -> tuple[dict[str, Part], dict[str, Check], ReadGauges]:
    """Return the parts of *roles*, their readiness checks, and the function that reads their gauges."""
    parts: dict[str, Part] = {}
    readings: list[Reading] = []
    checks: dict[str, Check] = {"postgres": schema.readiness(pool, seconds=settings.database_timeout_seconds)}
    if "relay" in roles:
        woken = asyncio.Event()
        relay = Relay(settings, pool, woken)
        parts["relay"] = relay.run
        parts["listener"] = Listener(settings, woken, relay.marks).run
        parts["discrepancies"] = partial(reconciliation.run, pool)
        if settings.retention_days is not None:
            parts["retention"] = Retention(settings, pool, relay_waker, days=settings.retention_days).run
        readings.append(partial(outbox_tables.read_gauges, relay.marks))
        checks["relay"] = relay.check
    if "notifications" in roles:
        due = asyncio.Event()
        notification_consumer = notifications.consumer(settings, pool, due)
        parts["notifications"] = notification_consumer.run
        parts["emails"] = Postman(settings, pool, due, relay_waker).run
        parts["secret_keys"] = lambda _: _remember_secret_keys(settings, pool)
        readings.append(ledger.read_gauges)
        checks["notifications"] = notification_consumer.check
    if "calculations" in roles:
        calculation_consumer = calculations.consumer(settings, pool, relay_waker)
        parts["calculations"] = calculation_consumer.run
        checks["calculations"] = calculation_consumer.check
    read_gauges = partial(gauges.read, pool, readings, timeout_seconds=settings.database_timeout_seconds)
    return parts, checks, read_gauges


async def run(
    settings: WorkerSettings, roles: frozenset[str], probes: socket.socket, stop: asyncio.Event
) -> None:
    """Run *roles* until *stop*. Then let them finish work in progress, within *shutdown_seconds*."""
    async with open_pool(settings) as pool:
        relay_waker = RelayWaker(pool, seconds=settings.work_timeout_seconds)
        parts, checks, read_gauges = assemble(settings, pool, roles, relay_waker)
        async with in_background("relay_waker", relay_waker.run), asyncio.TaskGroup() as running:
            running.create_task(server_probes.serve(checks, read_gauges, probes, stop))
            await _wait_for_schema(checks["postgres"], stop)
            for name, part in parts.items():
                running.create_task(keep_running(name, partial(part, stop)))
            _log.info("worker_started", roles=sorted(roles))
            await stop.wait()
            _log.info("worker_stopping")
    _log.info("worker_stopped")


async def _remember_secret_keys(settings: WorkerSettings, pool: Pool) -> None:
    """Store the fingerprints of new keys, for `doctor`. Links made with a changed key are no longer valid."""
    ring = SecretKeyRing.parse(settings.request_secret_keys)
    async with connections.transaction(pool, seconds=settings.work_timeout_seconds) as connection:
        for key_id in await remember_keys(connection, ring):
            _log.critical("secret_key_differs", key_id=key_id)


async def _wait_for_schema(check: Check, stop: asyncio.Event) -> None:
    """Wait until the database has the schema that this release needs. Until then /readyz answers 503."""
    pauses = Pauses("worker_waits_for_schema")
    while not stop.is_set():
        try:
            await check()
        except (PostgresUnavailable, SchemaOutdated) as error:
            await pauses.log_and_wait(error, stop)
        else:
            return
