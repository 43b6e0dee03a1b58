"""Gauges whose values are in Postgres: read on a scrape, and then kept for a while."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import asyncpg
import msgspec
from prometheus_client import Gauge

from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.telemetry.metrics import UNKNOWN

KEPT_SECONDS = 10.0
COUNT_LIMIT = 10_000  # A gauge that shows this number means this many or more: counting has a bounded cost.


class Reading(msgspec.Struct, frozen=True):
    """Gauges of a role, and the function that reads them from Postgres and sets them."""

    gauges: Sequence[Gauge]
    read: Callable[[Connection], Awaitable[None]]


class Gauges:
    """Carries out readings on a scrape, at most once in *kept_seconds*, failed attempts included."""

    def __init__(
        self,
        pool: Pool,
        readings: Sequence[Reading],
        *,
        timeout_seconds: float,
        kept_seconds: float = KEPT_SECONDS,
    ) -> None:
        self._pool = pool
        self._readings = readings
        self._timeout_seconds = timeout_seconds
        self._kept_seconds = kept_seconds
        self._reading = asyncio.Lock()
        self._last_read = float("-inf")

    async def read(self) -> None:
        """Update the gauges. They are NaN while Postgres is unavailable or has no schema."""
        async with self._reading:
            if time.monotonic() - self._last_read < self._kept_seconds:
                return
            try:
                async with loans.connection(self._pool, seconds=self._timeout_seconds) as connection:
                    for reading in self._readings:
                        await reading.read(connection)
            except (PostgresUnavailable, asyncpg.UndefinedTableError):
                for reading in self._readings:
                    for gauge in reading.gauges:
                        gauge.set(UNKNOWN)
            self._last_read = time.monotonic()
