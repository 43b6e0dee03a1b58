"""The NOTIFY that wakes the relays."""

import asyncio
from contextlib import suppress

import asyncpg

from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool

CHANNEL = "outbox"  # for LISTEN and NOTIFY

_PAUSE_SECONDS = 0.005  # between two NOTIFYs


async def notify(connection: Connection) -> None:
    """Wake the relays. Not used in transactions that write, because NOTIFY makes commits queue for a lock.

    With a NOTIFY in every commit, 12,700 creates per second fell to 3,600. A NOTIFY is rejected while the
    server's queue for NOTIFY is full. Then the relays find the events by polling.
    """
    with suppress(asyncpg.ProgramLimitExceededError):
        await connection.execute("SELECT pg_notify($1, '')", CHANNEL)


class RelayWaker:
    """Wakes the relays after commits. If a NOTIFY is lost, the relays find the events by polling.

    After a quiet time, a NOTIFY is sent at once. Otherwise all commits during a pause share one.
    """

    def __init__(self, pool: Pool, *, seconds: float) -> None:
        self._pool = pool
        self._seconds = seconds
        self._committed = asyncio.Event()

    def wake(self) -> None:
        """Record a commit. Returns at once."""
        self._committed.set()

    async def run(self) -> None:
        """Send a NOTIFY after commits, until cancelled."""
        while True:
            await self._committed.wait()
            self._committed.clear()
            with suppress(PostgresUnavailable):
                async with connections.acquired(self._pool, seconds=self._seconds) as connection:
                    await notify(connection)
            await asyncio.sleep(_PAUSE_SECONDS)
