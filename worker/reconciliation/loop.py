"""What does not add up, looked for every few minutes, for Prometheus."""

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta

import structlog

from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool
from service.server.background import in_background
from service.telemetry import logs
from worker import metrics
from worker.operating import request_history
from worker.reconciliation import checks
from worker.reconciliation.checks import Limits
from worker.settings import WorkerSettings

_LONGEST_LOOK_SECONDS = 30.0
_REST_FACTOR = 20  # a look that takes long is followed by a rest so many times as long

_log = structlog.get_logger()


class Discrepancies:
    """Compares the tables now and then, as `python -m worker reconcile` does, for the requests of late."""

    def __init__(self, settings: WorkerSettings, pool: Pool) -> None:
        self._settings = settings
        self._pool = pool

    async def run(self, stop: asyncio.Event) -> None:
        """Look again and again until *stop*, which does not wait for the end of a look."""
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
        """Look once. While Postgres does not answer, the numbers stay what they were."""
        since = datetime.now(UTC) - timedelta(seconds=self._settings.reconcile_window_seconds)
        limits = Limits(first_id=request_history.id_at(since))
        try:
            async with loans.connection(self._pool, seconds=_LONGEST_LOOK_SECONDS) as connection:
                found = await checks.reconcile(connection, limits)
        except PostgresUnavailable as error:
            _log.warning("reconciliation_failed", error=logs.summarize(error))
            return
        for anomaly in found.anomalies:
            metrics.discrepancies.labels(anomaly.name).set(anomaly.count)
        metrics.reconciled_at.set_to_current_time()
