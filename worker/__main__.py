"""The command line of the worker: `python -m worker [relay|notifications|calculations ...]`.

For operators: `python -m worker outbox|dead-letters|trace|reconcile|doctor`, each with `--help`.
"""

import argparse
import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial

import structlog
import uvloop

from service.outbox.waker import RelayWaker
from service.postgres import schema
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool, open_pool
from service.postgres.schema import SchemaOutdated
from service.server import probes as server_probes
from service.server.background import in_background, keep_running
from service.server.http_server import listen, stop_on_signals
from service.server.probes import Check, ReadGauges
from service.settings import InvalidSetting, load
from service.telemetry import logs, tracing
from worker import gauges as worker_gauges
from worker.consumers import calculations, notifications
from worker.mail.postman import Postman
from worker.operating import commands
from worker.reconciliation.loop import Discrepancies
from worker.relay.listener import Listener
from worker.relay.loop import Relay
from worker.settings import WorkerSettings
from worker.waiting import Pauses

ROLES = ("relay", "notifications", "calculations")

_CUT_OFF = 1  # the exit status

_log = structlog.get_logger()

Part = Callable[[asyncio.Event], Coroutine[None, None, None]]


def main() -> int:
    """Run the roles named on the command line, or all, until SIGTERM; or one operator command to its end."""
    if sys.argv[1:2] and sys.argv[1] in commands.COMMANDS:
        return commands.main(sys.argv[1:])
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument(
        "roles", nargs="*", metavar="ROLE", help=f"of {', '.join(ROLES)}; all when none is named"
    )
    roles = frozenset(parser.parse_args().roles or ROLES)
    if unknown := roles.difference(ROLES):
        parser.error(f"no such role: {', '.join(sorted(unknown))}")
    try:
        settings = load(WorkerSettings)
        logs.configure(settings)
        with tracing.exporting(settings, service="calculation-requests-worker"):
            uvloop.run(run(settings, roles))
    except InvalidSetting as error:
        print(error, file=sys.stderr)
        return 1
    except BaseExceptionGroup as failures:
        for failure in failures.exceptions:
            _log.critical("worker_failed", **logs.describe(failure))
        return 1
    return 0


async def run(settings: WorkerSettings, roles: frozenset[str]) -> None:
    """Run *roles* until SIGTERM or SIGINT; what is in hand then is settled first, in *shutdown_seconds*."""
    stop = stop_on_signals()
    with listen(settings.host, settings.health_port) as probes:
        async with open_pool(settings) as pool:
            await _run_parts(settings, roles, pool, probes, stop)
    _log.info("worker_stopped")


async def _run_parts(
    settings: WorkerSettings,
    roles: frozenset[str],
    pool: Pool,
    probes: socket.socket,
    stop: asyncio.Event,
) -> None:
    relay_waker = RelayWaker(pool, timeout_seconds=settings.work_timeout_seconds)
    parts, checks, read_gauges = assemble(settings, pool, roles, relay_waker)
    async with in_background("relay_waker", relay_waker.run), asyncio.TaskGroup() as running:
        running.create_task(server_probes.serve(checks, read_gauges, probes, stop))
        await _wait_for_schema(checks["postgres"], settings, stop)
        for name, part in parts.items():
            running.create_task(keep_running(name, partial(part, stop)))
        _log.info("worker_started", roles=sorted(roles))
        try:
            await stop.wait()
        finally:  # or a part has failed
            _log.info("worker_stopping")
            _cut_off_after(settings.shutdown_seconds)


def _cut_off_after(seconds: float) -> None:
    """End the process then, whatever it waits for: nothing is lost by that, as by any crash.

    From a thread, because what does not end may be the event loop.
    """

    def cut_off() -> None:
        _log.warning("worker_cut_off", after_seconds=seconds)
        os._exit(_CUT_OFF)

    timer = threading.Timer(seconds, cut_off)
    timer.daemon = True
    timer.start()


async def _wait_for_schema(check: Check, settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Do nothing, and be seen not to be ready, until the database has the schema that this release needs."""
    pauses = Pauses("worker_waits_for_schema", longest_seconds=settings.longest_outage_pause_seconds)
    while not stop.is_set():
        try:
            await check()
        except (PostgresUnavailable, SchemaOutdated) as error:
            await pauses.after(error, stop)
        else:
            return


def assemble(
    settings: WorkerSettings, pool: Pool, roles: frozenset[str], relay_waker: RelayWaker
) -> tuple[dict[str, Part], dict[str, Check], ReadGauges]:
    """Return what *roles* are made of, their readiness checks, and what reads their gauges."""
    parts: dict[str, Part] = {}
    readings: list[worker_gauges.Reading] = []
    checks = {"postgres": schema.readiness(pool, seconds=settings.database_timeout_seconds)}
    if "relay" in roles:
        woken = asyncio.Event()
        relay = Relay(settings, pool, woken)
        parts["relay"] = relay.run
        parts["listener"] = Listener(settings, woken).run
        parts["discrepancies"] = Discrepancies(settings, pool).run
        readings.append(worker_gauges.of_outbox(relay))
        checks["relay"] = relay.check
    if "notifications" in roles:
        due = asyncio.Event()
        notification_consumer = notifications.consumer(settings, pool, due)
        parts["notifications"] = notification_consumer.run
        parts["emails"] = Postman(settings, pool, due, relay_waker).run
        readings.append(worker_gauges.of_emails)
        checks["notifications"] = notification_consumer.check
    if "calculations" in roles:
        calculation_consumer = calculations.consumer(settings, pool, relay_waker)
        parts["calculations"] = calculation_consumer.run
        checks["calculations"] = calculation_consumer.check
    gauges = worker_gauges.Gauges(pool, readings, timeout_seconds=settings.database_timeout_seconds)
    return parts, checks, gauges.read


if __name__ == "__main__":
    sys.exit(main())
