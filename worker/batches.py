"""Work in batches: the items that arrive while one batch is done make the next one."""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Generic, TypeAlias, TypeVar

import structlog

from service.postgres.outages import PostgresUnavailable
from service.telemetry import logs

LARGEST_BATCH = 256
_SHORTEST_PAUSE_SECONDS = 0.005  # before an item is tried again
_LONGEST_PAUSE_SECONDS = 1.0

Item = TypeVar("Item")
Failure: TypeAlias = Exception | None  # why an item failed, or None when it is done
Failures: TypeAlias = Sequence[Failure]

_log = structlog.get_logger()


class RowLocked(Exception):
    """Another transaction has locked a row that the item changes. The item is to be tried again soon."""


class Batches(Generic[Item]):
    """Does items for their callers, in batches of at most LARGEST_BATCH, one after the other.

    No item waits for others to arrive: one that comes alone is a batch. The more arrive, the less each costs.
    *work* does a batch, in one transaction of Postgres or over one connection to RabbitMQ, and returns a
    failure or None for each item. It should return RowLocked instead of waiting for a lock, which would delay
    all the others. After an exception of it, other than an outage of Postgres, each item is done alone, so
    that only the one at fault fails.
    """

    def __init__(self, work: Callable[[Sequence[Item]], Awaitable[Failures]]) -> None:
        self._work = work
        # Each with its failure or None, as a result: asyncio would log an exception that is never retrieved,
        # values and all. Their callers bound them.
        self._waiting: deque[tuple[Item, asyncio.Future[Failure]]] = deque()
        self._working: asyncio.Task[None] | None = None

    async def done(self, item: Item) -> None:
        """Return once *item* is done, however long Postgres is down or a row is locked.

        Raises any other failure, an outage of RabbitMQ included, and what *work* raised for it.
        """
        pause = _SHORTEST_PAUSE_SECONDS
        while True:
            failure: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
            self._waiting.append((item, failure))
            if self._working is None:
                # In a context of its own: what it logs and traces is not about this item alone.
                self._working = asyncio.create_task(self._work_through(), context=Context())
            error = await failure
            if error is None:
                return
            if not isinstance(error, (PostgresUnavailable, RowLocked)):
                raise error
            if isinstance(error, RowLocked) and pause == _LONGEST_PAUSE_SECONDS:
                _log.warning("row_locked")
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads the items
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _work_through(self) -> None:
        """Do batches until no item is waiting."""
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), LARGEST_BATCH))]
                batch = [each for each in batch if not each[1].done()]  # The callers of the others left.
                failures = await self._attempt([item for item, _ in batch]) if batch else []
                for (_, waiting), failure in zip(batch, failures, strict=True):
                    if not waiting.done():
                        waiting.set_result(failure)
        finally:
            self._working = None

    async def _attempt(self, items: Sequence[Item]) -> Failures:
        try:
            return await self._work(items)
        except PostgresUnavailable as outage:
            # Each item retries by itself: as a warning, an outage would be hundreds of lines a second.
            _log.debug("batch_waits_for_postgres", items=len(items), error=logs.summarize(outage))
            return [outage] * len(items)
        except Exception as error:  # noqa: BLE001 - raised again for the item at fault
            if len(items) == 1:
                return [error]
        return [failure for item in items for failure in await self._attempt([item])]
