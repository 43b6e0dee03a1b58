"""Work in batches: the items that arrive while one batch is done make the next one."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from service.postgres.outages import PostgresUnavailable

LARGEST_BATCH = 256

Item = TypeVar("Item")
Outcome: TypeAlias = Exception | None  # why an item failed, or None when it is done
Outcomes: TypeAlias = Sequence[Outcome]


class RowLocked(Exception):
    """Another transaction has locked a row that the item changes. The item is to be tried again soon."""


class Batches(Generic[Item]):
    """Does items for their callers, in batches of at most LARGEST_BATCH, one after the other.

    No item waits for others to arrive: one that comes alone is a batch. The more arrive, the less each costs.
    *work* does a batch in one transaction, and returns an outcome for each item. It should return RowLocked
    instead of waiting for a lock, which would delay all the others. After an exception of it, other than an
    outage, each item is done alone, so that only the one at fault fails.
    """

    def __init__(self, work: Callable[[Sequence[Item]], Awaitable[Outcomes]]) -> None:
        self._work = work
        self._waiting: deque[_Waiting[Item]] = deque()  # their callers bound it
        self._arrived = asyncio.Event()

    async def run(self) -> None:
        """Do batches until cancelled."""
        while True:
            await self._arrived.wait()
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), LARGEST_BATCH))]
            if not self._waiting:
                self._arrived.clear()
            present = [each for each in batch if not each.outcome.done()]
            if present:
                outcomes = await self._attempt([each.item for each in present])
                for each, outcome in zip(present, outcomes, strict=True):
                    if not each.outcome.done():
                        each.outcome.set_result(outcome)

    async def done(self, item: Item) -> None:
        """Return once *item* is done. Raises its outcome, or what *work* raised for it."""
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(item, outcome))
        self._arrived.set()
        if (error := await outcome) is not None:
            raise error

    async def _attempt(self, items: Sequence[Item]) -> Outcomes:
        try:
            return await self._work(items)
        except PostgresUnavailable as outage:
            return [outage] * len(items)
        except Exception as error:  # noqa: BLE001 - raised again for the item at fault
            if len(items) == 1:
                return [error]
        outcomes: list[Outcome] = []
        for item in items:
            if outcomes and isinstance(outcomes[-1], PostgresUnavailable):
                outcomes.append(outcomes[-1])  # Each further attempt would wait for Postgres too.
            else:
                outcomes += await self._attempt([item])
        return outcomes


class _Waiting(NamedTuple, Generic[Item]):
    """An item, and the outcome that its caller waits for."""

    item: Item
    # An error is a result here: asyncio would log an exception that is never retrieved, values and all.
    outcome: "asyncio.Future[Outcome]"
