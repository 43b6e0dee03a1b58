"""Receives the NOTIFY that follows new events. If a NOTIFY is lost, the relay finds the events by polling."""

import asyncio

from service.outbox import lanes
from service.postgres.outages import OUTAGE_ERRORS, PostgresUnavailable
from service.postgres.pool import connect
from worker.settings import WorkerSettings
from worker.waiting import Pauses, wait_at_most

_CHECK_SECONDS = 30.0  # between checks that the connection is not half-open


class Listener:
    """A direct connection that LISTENs. Regular checks find a half-open connection, which raises no error."""

    def __init__(self, settings: WorkerSettings, woken: asyncio.Event) -> None:
        self._settings = settings
        self._woken = woken

    async def run(self, stop: asyncio.Event) -> None:
        """Listen until *stop*. Reconnect whenever the connection fails."""
        pauses = Pauses("listener_paused")
        while not stop.is_set():
            try:
                await self._listen(pauses, stop)
            except (PostgresUnavailable, *OUTAGE_ERRORS) as error:
                await pauses.log_and_wait(error, stop)

    async def _listen(self, pauses: Pauses, stop: asyncio.Event) -> None:
        seconds = self._settings.database_timeout_seconds
        connection = await connect(
            self._settings.listen_database_url or self._settings.database_url,
            timeout=seconds,
            command_timeout=seconds,
        )
        try:
            lost = asyncio.Event()
            connection.add_termination_listener(lambda _: lost.set())
            await connection.add_listener(lanes.CHANNEL, lambda *_: self._woken.set())
            while not stop.is_set():
                await connection.execute("SELECT 1")
                pauses.reset()
                await wait_at_most(_CHECK_SECONDS, lost, stop)
        finally:
            connection.terminate()
