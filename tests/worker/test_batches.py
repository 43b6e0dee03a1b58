"""Items are done in batches of what has arrived, and none fails for another's fault."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.harness.waiting import eventually
from tests.worker.consumers.conftest import Work
from worker.batches import LARGEST_BATCH, Batches


@pytest.fixture
def work():
    return Work()


@pytest.fixture
def batches(work):
    return Batches(lambda numbers: work.record(None, numbers))


async def all_at_once(batches: Batches[int], work: Work, numbers: Sequence[int]) -> list[str]:
    """Have numbers arrive while the number 1 is done. Returns the names of their outcomes."""
    work.going_on.clear()
    first = asyncio.create_task(batches.process(1))
    await eventually(lambda: work.batches)
    others = [asyncio.create_task(batches.process(number)) for number in numbers]
    await asyncio.sleep(0)
    work.going_on.set()
    await first
    return [type(each).__name__ for each in await asyncio.wait_for(asyncio.gather(*others), 30)]


async def test_batch_is_limited(batches, work):
    await all_at_once(batches, work, range(100, 101 + LARGEST_BATCH))

    assert [len(batch) for batch in work.batches] == [1, LARGEST_BATCH, 1]


@pytest.mark.parametrize(("bad", "error"), [(13, "Refused"), (0, "ZeroDivisionError"), (7, "WorkCancelled")])
async def test_item_at_fault_fails_alone(batches, work, bad, error):
    numbers = [*range(100, 227), bad, *range(228, 356)]

    outcomes = await all_at_once(batches, work, numbers)

    assert len(numbers) == LARGEST_BATCH
    assert dict(zip(numbers, outcomes, strict=True)) == dict.fromkeys(numbers, "NoneType") | {bad: error}


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
