"""Gauges whose values are in Postgres: read on a scrape, and then kept for a while."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import asyncpg

from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.telemetry.metrics import UNKNOWN
from worker import metrics

COUNT_LIMIT = 10_000  # A gauge that shows this number means this many or more: counting has a bounded cost.
_KEPT_SECONDS = 10.0

Reading: TypeAlias = Callable[[Connection], Awaitable[None]]  # sets the gauges of a role


class Gauges:
    """Carries out readings on a scrape, seldom, failed attempts included."""

    def __init__(self, pool: Pool, readings: Sequence[Reading], *, timeout_seconds: float) -> None:
        self._pool = pool
        self._readings = readings
        self._timeout_seconds = timeout_seconds
        self._reading = asyncio.Lock()
        self._last_read = float("-inf")

    async def read(self) -> None:
        """Update the gauges. They are NaN while Postgres is unavailable or has no schema."""
        async with self._reading:
            if time.monotonic() - self._last_read < _KEPT_SECONDS:
                return
            try:
                async with loans.connection(self._pool, seconds=self._timeout_seconds) as connection:
                    for read in self._readings:
                        await read(connection)
            except (PostgresUnavailable, asyncpg.UndefinedTableError):
                for gauge in metrics.FROM_POSTGRES:
                    gauge.set(UNKNOWN)
            self._last_read = time.monotonic()
