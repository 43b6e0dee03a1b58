"""Items are done in batches of what has arrived, and none fails for another's fault."""

import asyncio
from collections.abc import Sequence

import pytest

from service.postgres.outages import PostgresUnavailable
from tests.harness.waiting import eventually
from worker.batches import LARGEST_BATCH, Batches, Failures, RowLocked


class Refused(Exception):
    """This item is refused."""


class Work:
    """Records numbers. Refuses 13, fails with 0, and with 7 as aiormq may: by a CancelledError of its own."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.locked: set[int] = set()
        self.is_down = False
        self.going_on = asyncio.Event()
        self.going_on.set()

    async def do(self, numbers: Sequence[int]) -> Failures:
        """Wait for `going_on`, then return an outcome for each number."""
        self.batches.append(list(numbers))
        await self.going_on.wait()
        if self.is_down:
            raise PostgresUnavailable
        if 0 in numbers:
            raise ZeroDivisionError
        if 7 in numbers:
            raise asyncio.CancelledError
        failures = {13: Refused(), **{number: RowLocked() for number in self.locked}}
        return [failures.get(number) for number in numbers]


@pytest.fixture
def work():
    return Work()


@pytest.fixture
def batches(work):
    return Batches(work.do)


async def all_at_once(batches: Batches[int], work: Work, numbers: Sequence[int]) -> list[str]:
    """Have numbers arrive while the number 1 is done. Returns the names of their outcomes."""
    work.going_on.clear()
    first = asyncio.create_task(batches.process(1))
    await eventually(lambda: work.batches)
    others = [asyncio.create_task(batches.process(number)) for number in numbers]
    await asyncio.sleep(0)
    work.going_on.set()
    await first
    outcomes = asyncio.gather(*others, return_exceptions=True)
    return [type(each).__name__ for each in await asyncio.wait_for(outcomes, 30)]


async def test_batch_is_limited(batches, work):
    await all_at_once(batches, work, range(100, 101 + LARGEST_BATCH))

    assert [len(batch) for batch in work.batches] == [1, LARGEST_BATCH, 1]


@pytest.mark.parametrize(("bad", "error"), [(13, "Refused"), (0, "ZeroDivisionError"), (7, "WorkCancelled")])
async def test_item_at_fault_fails_alone(batches, work, bad, error):
    numbers = [*range(100, 227), bad, *range(228, 356)]

    outcomes = await all_at_once(batches, work, numbers)

    assert len(numbers) == LARGEST_BATCH
    assert dict(zip(numbers, outcomes, strict=True)) == dict.fromkeys(numbers, "NoneType") | {bad: error}


async def test_items_wait_together_for_the_end_of_an_outage(batches, work):
    work.is_down = True
    doing = [asyncio.create_task(batches.process(number)) for number in (1, 2, 3)]
    await eventually(lambda: len(work.batches) > 5)
    assert work.batches[0] == [1, 2, 3]
    assert not any(each.done() for each in doing)

    work.is_down = False

    await asyncio.gather(*doing)


async def test_item_whose_row_is_locked_delays_no_other_and_is_done_later(batches, work):
    work.locked = {2}
    locked = asyncio.create_task(batches.process(2))

    await asyncio.gather(*(batches.process(number) for number in (1, 3)))
    assert not locked.done()
    work.locked = set()

    await locked


async def test_item_whose_caller_has_left_is_not_done_and_keeps_no_other_waiting(batches, work):
    work.going_on.clear()
    leaving, first = [asyncio.create_task(batches.process(number)) for number in (4, 1)]
    await eventually(lambda: work.batches)
    left = asyncio.create_task(batches.process(2))
    await asyncio.sleep(0)
    leaving.cancel()
    left.cancel()
    await asyncio.sleep(0)
    work.going_on.set()
    await asyncio.wait_for(first, 30)
    await batches.process(3)

    assert work.batches == [[4, 1], [3]]
