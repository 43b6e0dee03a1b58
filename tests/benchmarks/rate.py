"""Rates: of what is done by a program that is watched, and of calls that are made on time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine

from deploy.local.errors import LocalStackError
from tests.benchmarks.comparison import P50, P99, PER_SECOND, Figures
from tests.benchmarks.processor_time import Meter
from tests.harness.waiting import until

_START_SECONDS = 30.0
_PAUSE_SECONDS = 0.02
_STRAGGLER_SECONDS = 15.0


async def rate_of(
    done: Callable[[], Awaitable[int]], every: int, meter: Callable[[], Meter], *, seconds: float
) -> Figures:
    """Return how many a second are *done*, from the first ones until *every* one is, or the time is up.

    Also returns the processor time of one.
    """

    async def is_complete() -> bool:
        return await done() >= every

    if not await until(done, seconds=_START_SECONDS, pause_seconds=_PAUSE_SECONDS):
        raise LocalStackError("Nothing is done.")
    first, began, metered = await done(), time.monotonic(), meter()
    await until(is_complete, seconds=seconds, pause_seconds=_PAUSE_SECONDS)
    items = await done() - first
    return {PER_SECOND: items / (time.monotonic() - began), **metered.figures(items)}


async def call_steadily(
    call: Callable[[], Coroutine[None, None, None]], *, rate: float, seconds: float
) -> None:
    """Make *rate* calls a second, even if earlier ones are not done."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(round(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            group.create_task(call())


class Waits:
    """When each wait began and ended, by the uuid of a request."""

    def __init__(self) -> None:
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    def end(self, uuid: str) -> None:
        self.ended.setdefault(uuid, time.monotonic())

    async def complete(self, *, seconds: float = _STRAGGLER_SECONDS) -> None:
        """Wait until every wait has ended. Raises LocalStackError if one does not, or none began."""
        await until(lambda: self.began.keys() <= self.ended.keys(), seconds=seconds, pause_seconds=0.01)
        if not self.began or self.began.keys() - self.ended.keys():
            raise LocalStackError(f"Of {len(self.began)} events, {len(self.ended)} arrived.")

    def forget(self) -> None:
        self.began.clear()
        self.ended.clear()

    def figures(self) -> Figures:
        """Return quantiles in milliseconds."""
        waits = sorted(max(0.0, self.ended[uuid] - began) * 1000 for uuid, began in self.began.items())
        return {name: waits[int(share * (len(waits) - 1))] for name, share in ((P50, 0.5), (P99, 0.99))}
