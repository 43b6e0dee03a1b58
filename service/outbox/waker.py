"""Wakes the relay after commits: one coalesced NOTIFY, never one per request."""

import asyncio
from contextlib import suppress

from service.outbox import writing
from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool

_INTERVAL_SECONDS = (0.005, 0.02)  # between two, with few commits and with many
_SECONDS_PER_COMMIT = 0.001


class RelayWaker:
    """Sends one NOTIFY for all the commits of a few milliseconds. A lost one costs the relay's next poll.

    The more there are, the longer it waits until the next: the relay is busy then, and looks by itself.
    """

    def __init__(self, pool: Pool, *, timeout_seconds: float) -> None:
        self._pool = pool
        self._timeout_seconds = timeout_seconds
        self._committed = asyncio.Event()
        self._commits = 0

    def wake(self) -> None:
        """Say that something was committed; returns at once."""
        self._commits += 1
        self._committed.set()

    async def run(self) -> None:
        """Notify after commits until cancelled."""
        shortest, longest = _INTERVAL_SECONDS
        while True:
            await self._committed.wait()
            self._committed.clear()
            pause = min(max(self._commits * _SECONDS_PER_COMMIT, shortest), longest)
            self._commits = 0
            with suppress(PostgresUnavailable):
                async with loans.connection(self._pool, seconds=self._timeout_seconds) as connection:
                    await writing.notify(connection)
            await asyncio.sleep(pause)
