"""The gauges that only Postgres can tell: read when somebody looks, and then kept for a while."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import asyncpg

from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.telemetry.metrics import UNKNOWN
from worker import metrics
from worker.mail import ledger
from worker.relay import outbox
from worker.relay.loop import Relay

KEPT_SECONDS = 10.0
EXACT_LIMIT = 10_000  # what is beyond that is estimated

Reading = Callable[[Connection], Awaitable[None]]


class Gauges:
    """Carries out its readings for whoever scrapes, at most once in *kept_seconds*, failures included."""

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
        """Bring the gauges up to date. While Postgres cannot tell, they show no number."""
        async with self._reading:
            if time.monotonic() - self._last_read < self._kept_seconds:
                return
            try:
                async with loans.connection(self._pool, seconds=self._timeout_seconds) as connection:
                    for reading in self._readings:
                        await reading(connection)
            except (PostgresUnavailable, asyncpg.UndefinedTableError):
                for gauge in metrics.READ_FROM_POSTGRES:
                    gauge.set(UNKNOWN)
            self._last_read = time.monotonic()


def of_outbox(relay: Relay) -> Reading:
    """Return the reading of the outbox, which begins where this relay knows that the lanes begin."""
    return partial(_read_outbox, relay=relay)


async def _read_outbox(connection: Connection, *, relay: Relay) -> None:
    sizes = await outbox.read_sizes(connection, relay.low_water_marks, exact_limit=EXACT_LIMIT)
    metrics.outbox_pending.set(sizes.pending)
    metrics.outbox_failing.set(sizes.failing)
    metrics.outbox_waiting.set(sizes.waiting)
    metrics.outbox_parked.set(sizes.parked)
    metrics.outbox_oldest_age.set(sizes.oldest_seconds)


async def of_emails(connection: Connection) -> None:
    """Read how many e-mails are pending."""
    pending = await ledger.read_pending(connection, exact_limit=EXACT_LIMIT)
    metrics.emails_pending.set(pending.number)
    metrics.emails_oldest_age.set(pending.oldest_seconds)
