"""Gauges whose values are read from Postgres at each scrape."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import asyncpg

from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.telemetry.metrics import UNKNOWN
from worker import metrics

COUNT_LIMIT = 10_000  # Counting stops here, to bound its cost. Then a gauge is too low.

Reading: TypeAlias = Callable[[Connection], Awaitable[None]]  # sets the gauges of a role


async def read(pool: Pool, readings: Sequence[Reading], *, timeout_seconds: float) -> None:
    """Update the gauges. They are NaN while Postgres is unavailable or has no schema."""
    try:
        async with connections.acquired(pool, seconds=timeout_seconds) as connection:
            for reading in readings:
                await reading(connection)
    except (PostgresUnavailable, asyncpg.UndefinedTableError):
        for gauge in metrics.FROM_POSTGRES:
            gauge.set(UNKNOWN)
