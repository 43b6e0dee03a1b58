"""Receives the NOTIFY that follows new events. If a NOTIFY is lost, the relay finds the events by polling."""

import asyncio

from service.outbox import waking
from service.postgres.outages import OUTAGE_ERRORS, PostgresUnavailable
from service.postgres.pool import connect
from worker.settings import WorkerSettings
from worker.waiting import Pauses, wait_at_most

_CHECK_SECONDS = 30.0  # between checks that the connection is not half-open


async def run(settings: WorkerSettings, woken: asyncio.Event, stop: asyncio.Event) -> None:
    """Listen until *stop*, and set *woken* at each NOTIFY. Reconnect whenever the connection fails."""
    pauses = Pauses("listener_paused")
    while not stop.is_set():
        try:
            await _listen(settings, woken, pauses, stop)
        except (PostgresUnavailable, *OUTAGE_ERRORS) as error:
            await pauses.log_and_wait(error, stop)


async def _listen(
    settings: WorkerSettings, woken: asyncio.Event, pauses: Pauses, stop: asyncio.Event
) -> None:
    """LISTEN on a direct connection. Regular checks find a half-open one, which raises no error."""
    seconds = settings.database_timeout_seconds
    connection = await connect(
        settings.listen_database_url or settings.database_url, timeout=seconds, command_timeout=seconds
    )
    try:
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        await connection.add_listener(waking.CHANNEL, lambda *_: woken.set())
        while not stop.is_set():
            await connection.execute("SELECT 1")
            pauses.reset()
            await wait_at_most(_CHECK_SECONDS, lost, stop)
    finally:
        connection.terminate()
