"""The loop that looks for anomalies every few minutes and exports them as metrics."""

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta

import structlog

from service.identifiers import first_id_at
from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool
from service.server.background import in_background
from service.telemetry import logs
from worker import metrics
from worker.reconciliation import checks
from worker.reconciliation.checks import Limits
from worker.settings import WorkerSettings

_LONGEST_LOOK_SECONDS = 30.0
_REST_FACTOR = 20  # The rest after a look is at least this many times as long as the look.
_LOCK = 0x5D17_0002  # an advisory lock, held by the replica that looks

_log = structlog.get_logger()


class Discrepancies:
    """Looks for anomalies of recent requests, as `python -m worker reconcile` does for all."""

    def __init__(self, settings: WorkerSettings, pool: Pool) -> None:
        self._settings = settings
        self._pool = pool

    async def run(self, stop: asyncio.Event) -> None:
        """Look at every interval until *stop*, which interrupts a look."""
        async with in_background("reconciliation", self._keep_looking):
            await stop.wait()

    async def _keep_looking(self) -> None:
        interval = self._settings.reconcile_seconds
        await asyncio.sleep(random.uniform(0, interval))  # noqa: S311 - spreads the replicas, keeps no secret
        while True:
            began = time.monotonic()
            await self.look()
            await asyncio.sleep(max(interval, _REST_FACTOR * (time.monotonic() - began)))

    async def look(self) -> None:
        """Look once, unless another replica is looking. Without a look the gauges keep their values."""
        since = datetime.now(UTC) - timedelta(seconds=self._settings.reconcile_window_seconds)
        limits = Limits(first_id=first_id_at(since))
        try:
            async with loans.transaction(self._pool, seconds=_LONGEST_LOOK_SECONDS) as connection:
                await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                if not await loans.try_lock(connection, _LOCK):
                    return
                anomalies = await checks.find_anomalies(connection, limits)
        except PostgresUnavailable as error:
            _log.warning("reconciliation_failed", error=logs.summarize(error))
            return
        for anomaly in anomalies:
            metrics.discrepancies.labels(anomaly.name).set(anomaly.count)
        metrics.reconciled_at.set_to_current_time()
