"""Receives the NOTIFY that says the outbox has grown; the relay's polling covers for it when it fails."""

import asyncio

import asyncpg
import structlog

from service.outbox import writing
from service.postgres import outages
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection
from worker.settings import WorkerSettings
from worker.waiting import Pauses, rest

_log = structlog.get_logger()


class NothingHeard(Exception):
    """A NOTIFY of our own did not come back: the connection is dead, or goes through a pooler."""


class Listener:
    """A direct connection that LISTENs, and tests itself: a half-open one gives no error of its own."""

    def __init__(self, settings: WorkerSettings, woken: asyncio.Event) -> None:
        self._settings = settings
        self._woken = woken
        self._heard = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Listen until *stop*, connecting again whenever the connection fails."""
        pauses = Pauses("listener_paused", longest_seconds=self._settings.longest_outage_pause_seconds)
        while not stop.is_set():
            try:
                with outages.translated():
                    await self._listen(pauses, stop)
            except (PostgresUnavailable, NothingHeard) as error:
                await pauses.after(error, stop)

    async def _listen(self, pauses: Pauses, stop: asyncio.Event) -> None:
        seconds = self._settings.database_timeout_seconds
        connection: Connection = await asyncpg.connect(
            self._settings.listen_database_url or self._settings.database_url,
            timeout=seconds,
            command_timeout=seconds,
        )
        try:
            await connection.add_listener(writing.CHANNEL, self._hear)
            lost = asyncio.Event()
            connection.add_termination_listener(lambda _: lost.set())
            while not stop.is_set():
                await self._test(connection, seconds)
                pauses.reset()
                await rest(self._settings.relay_listen_check_seconds, lost, stop)
                if lost.is_set():
                    raise PostgresUnavailable
        finally:
            connection.terminate()

    async def _test(self, connection: Connection, seconds: float) -> None:
        self._heard.clear()
        await writing.notify(connection)
        await rest(seconds, self._heard)
        if not self._heard.is_set():
            raise NothingHeard
        if await connection.fetchval("SHOW transaction_read_only") == "on":
            raise PostgresUnavailable  # Those who write, and notify, may be connected to another server.

    def _hear(self, *_: object) -> None:
        self._heard.set()
        self._woken.set()
