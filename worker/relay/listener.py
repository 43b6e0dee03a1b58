"""Receives the NOTIFY that follows new events. If one is lost, the relay finds the events when it polls."""

import asyncio

import asyncpg

from service.outbox import lanes
from service.postgres import outages
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection
from worker.settings import WorkerSettings
from worker.waiting import Pauses, wait_at_most

_CHECK_SECONDS = 30.0  # from one self-test to the next: meanwhile the relay polls


class Listener:
    """A direct connection that LISTENs. It tests itself, because a half-open connection raises no error."""

    def __init__(
        self, settings: WorkerSettings, woken: asyncio.Event, *, check_seconds: float = _CHECK_SECONDS
    ) -> None:
        self._settings = settings
        self._woken = woken
        self._check_seconds = check_seconds
        self._received = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Listen until *stop*. Reconnect whenever the connection fails."""
        pauses = Pauses("listener_paused")
        while not stop.is_set():
            try:
                with outages.translated():
                    await self._listen(pauses, stop)
            except PostgresUnavailable as error:
                await pauses.log_and_wait(error, stop)

    async def _listen(self, pauses: Pauses, stop: asyncio.Event) -> None:
        seconds = self._settings.database_timeout_seconds
        connection: Connection = await asyncpg.connect(
            self._settings.listen_database_url or self._settings.database_url,
            timeout=seconds,
            command_timeout=seconds,
        )
        try:
            await connection.add_listener(lanes.CHANNEL, self._receive)
            lost = asyncio.Event()
            connection.add_termination_listener(lambda _: lost.set())
            while not stop.is_set():
                await self._test(connection, seconds)
                pauses.reset()
                await wait_at_most(self._check_seconds, lost, stop)
                if lost.is_set():
                    raise PostgresUnavailable
        finally:
            connection.terminate()

    async def _test(self, connection: Connection, seconds: float) -> None:
        """Receive a NOTIFY sent over this connection, and see that the server takes writes."""
        self._received.clear()
        await lanes.notify(connection)
        await wait_at_most(seconds, self._received)
        if not self._received.is_set():
            raise PostgresUnavailable from TimeoutError()  # It is dead, or leads through a pooler.
        if await connection.fetchval("SHOW transaction_read_only") == "on":
            raise PostgresUnavailable  # The API writes, and notifies, on another server.

    def _receive(self, *_: object) -> None:
        self._received.set()
        self._woken.set()
