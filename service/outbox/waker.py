"""Wakes the relays after commits, with one NOTIFY for many commits."""

import asyncio
import math
import time
from contextlib import suppress

from service.outbox import lanes
from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool

_INTERVAL_SECONDS = (0.005, 0.02)  # from one NOTIFY to the next, with few commits and with many
_SECONDS_PER_COMMIT = 0.001
_QUIET_SECONDS = 0.005  # since the last commit


class RelayWaker:
    """Sends one NOTIFY for all commits of a few milliseconds. If it is lost, a relay's poll finds them.

    The more commits there are, the longer it waits until the next NOTIFY: a busy relay looks without one.
    """

    def __init__(self, pool: Pool, *, timeout_seconds: float) -> None:
        self._pool = pool
        self._timeout_seconds = timeout_seconds
        self._committed = asyncio.Event()
        self._commits = 0
        self._last = -math.inf

    def goes_with_commit(self) -> bool:
        """Whether the caller should write its NOTIFY in the transaction, instead of calling `wake` after it.

        That is a round trip sooner. Only a commit after a quiet time does it: see `lanes.notify`.
        """
        last, self._last = self._last, time.monotonic()
        return self._last - last >= _QUIET_SECONDS

    def wake(self) -> None:
        """Note a commit. Returns at once."""
        self._last = time.monotonic()
        self._commits += 1
        self._committed.set()

    async def run(self) -> None:
        """Send a NOTIFY after commits, until cancelled."""
        shortest, longest = _INTERVAL_SECONDS
        while True:
            await self._committed.wait()
            self._committed.clear()
            pause = min(max(self._commits * _SECONDS_PER_COMMIT, shortest), longest)
            self._commits = 0
            with suppress(PostgresUnavailable):
                async with loans.connection(self._pool, seconds=self._timeout_seconds) as connection:
                    await lanes.notify(connection)
            await asyncio.sleep(pause)
