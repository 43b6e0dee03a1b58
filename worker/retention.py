"""The loop that erases requests older than RETENTION_DAYS."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import UUID

import asyncpg
import structlog

from service.calculation_requests import erased
from service.identifiers import first_id_at
from service.operations import erasing
from service.outbox.lanes import lane_of
from service.outbox.waker import RelayWaker
from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.server.background import in_background
from service.telemetry import logs
from worker.operating import erased_letters
from worker.operating.answers import OperatorError
from worker.rabbitmq.connection import BROKER_ERRORS, BrokerUnavailable, address, open_connection
from worker.relay.lanes import lock_lanes
from worker.settings import WorkerSettings

_BATCH = 200  # requests looked up together; those of one lane are erased in one transaction
_PAUSE_SECONDS = 0.2  # between batches, for everything else that Postgres has to do
_SHORT_WAIT = "SET LOCAL lock_timeout = '0.5s'"  # for a row that is locked, by hand for instance
_LOCK = 0x5D17_0003  # an advisory lock, held by the replica that erases

_log = structlog.get_logger()


class Retention:
    """Erases what is older than RETENTION_DAYS, in small batches; of several replicas one at a time."""

    def __init__(
        self,
        settings: WorkerSettings,
        pool: Pool,
        relay: RelayWaker,
        *,
        longest_rest_seconds: float = 7200.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._longest_rest_seconds = longest_rest_seconds
        self._clock = clock
        self._pool = pool
        self._relay = relay

    async def run(self, stop: asyncio.Event) -> None:
        """Erase every hour, on average, until *stop*, which interrupts a batch."""
        days = self._settings.retention_days
        if days is None:
            await stop.wait()
            return
        async with in_background("retention", partial(self._keep_erasing, days)):
            await stop.wait()

    async def _keep_erasing(self, days: int) -> None:
        while True:
            await asyncio.sleep(random.uniform(0, self._longest_rest_seconds))  # noqa: S311 - spreads the replicas
            await self.erase_old(days=days)

    async def erase_old(self, *, days: int) -> None:
        """Erase every request that is older than this, and the dead letters of erased requests."""
        number = 0
        try:
            before = await self._read_now() - timedelta(days=days)
            async for erased_now in self._erase_batches(first_id_at(before)):
                number += erased_now
            await self._remove_dead_letters()
        except (PostgresUnavailable, BrokerUnavailable, OperatorError, *BROKER_ERRORS) as error:
            _log.warning("retention_interrupted", error=logs.summarize(error))
        if number:
            _log.info("requests_erased", number=number)

    async def _read_now(self) -> datetime:
        """Return the time of our clock or of Postgres's, the earlier one: a fast clock erases nothing."""
        async with loans.connection(self._pool, seconds=self._settings.work_timeout_seconds) as connection:
            theirs: datetime = await connection.fetchval("SELECT now()")
        return min(theirs, datetime.fromtimestamp(self._clock(), UTC))

    async def _erase_batches(self, before: UUID) -> AsyncIterator[int]:
        """Erase the older requests, batch by batch, and yield how many, lane by lane.

        Those of a lane are left for the next round if it, a request or an e-mail of it is locked. The round
        ends when another replica erases.
        """
        after = UUID(int=0)
        while request_ids := await self._read_oldest(after, before):
            for lane, in_lane in _by_lane(request_ids).items():
                erased_now = await self._erase_in_lane(lane, in_lane)
                if erased_now is None:
                    return
                if erased_now:
                    self._relay.wake()  # E-mails may have been cancelled.
                yield erased_now
            after = request_ids[-1]
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _read_oldest(self, after: UUID, before: UUID) -> list[UUID]:
        async with loans.connection(self._pool, seconds=self._settings.work_timeout_seconds) as connection:
            return await _read_oldest(connection, after, before)

    async def _erase_in_lane(self, lane: int, request_ids: Sequence[UUID]) -> int | None:
        """Erase requests of one lane. Returns their number, or None when another replica erases."""
        async with loans.transaction(self._pool, seconds=self._settings.work_timeout_seconds) as connection:
            if not await loans.try_lock(connection, _LOCK):
                return None
            if not (await lock_lanes(connection, [lane])).lanes:
                return 0
            await connection.execute(_SHORT_WAIT)
            try:
                return len(await erasing.erase(connection, request_ids))
            except asyncpg.LockNotAvailableError:
                return 0  # The COMMIT of a transaction that has failed is a ROLLBACK.

    async def _remove_dead_letters(self) -> None:
        settings = self._settings
        url = address(settings, "retention")
        async with open_connection(url, seconds=settings.broker_timeout_seconds) as broker:
            await erased_letters.remove(self._find_erased, broker)

    async def _find_erased(self, request_ids: Collection[UUID]) -> set[UUID]:
        async with loans.connection(self._pool, seconds=self._settings.work_timeout_seconds) as connection:
            return await erased.among(connection, request_ids)


def _by_lane(request_ids: Sequence[UUID]) -> Mapping[int, Sequence[UUID]]:
    by_lane = defaultdict(list)
    for request_id in request_ids:
        by_lane[lane_of(request_id)].append(request_id)
    return by_lane


async def _read_oldest(connection: Connection, after: UUID, before: UUID) -> list[UUID]:
    rows = await connection.fetch(
        """
        SELECT id
          FROM calculation_request
         WHERE id > $1
           AND id < $2
         ORDER BY id
         LIMIT $3
        """,
        after,
        before,
        _BATCH,
    )
    return [row["id"] for row in rows]
