"""Wakes the relay after commits: one coalesced NOTIFY, never one per request."""

import asyncio
from contextlib import suppress

from service import outbox, postgres
from service.postgres import Pool, PostgresUnavailable

_INTERVAL_SECONDS = 0.005


class RelayWaker:
    """Sends one NOTIFY for all the commits of a few milliseconds. A lost one costs the relay's next poll."""

    def __init__(self, pool: Pool, *, timeout_seconds: float) -> None:
        self._pool = pool
        self._timeout_seconds = timeout_seconds
        self._committed = asyncio.Event()

    def wake(self) -> None:
        """Say that something was committed; returns at once."""
        self._committed.set()

    async def run(self) -> None:
        """Notify after commits until cancelled."""
        while True:
            await self._committed.wait()
            self._committed.clear()
            with suppress(PostgresUnavailable):
                async with postgres.connection(self._pool, seconds=self._timeout_seconds) as connection:
                    await outbox.notify(connection)
            await asyncio.sleep(_INTERVAL_SECONDS)
