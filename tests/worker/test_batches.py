"""Items are done in batches of what has arrived, and none fails for another's fault."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from service.postgres.outages import PostgresUnavailable
from service.server.background import in_background
from tests.harness.waiting import eventually
from worker.batches import LARGEST_BATCH, Batches, Outcomes


class Refused(Exception):
    """This item is refused."""


class Work:
    """Records numbers. Refuses 13, fails with 0, and meets an outage with negative numbers."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.going_on = asyncio.Event()
        self.going_on.set()

    async def do(self, numbers: Sequence[int]) -> Outcomes:
        """Wait for `going_on`, then return an outcome for each number."""
        self.batches.append(list(numbers))
        await self.going_on.wait()
        if 0 in numbers:
            raise ZeroDivisionError
        if min(numbers) < 0:
            raise PostgresUnavailable
        return [Refused() if number == 13 else None for number in numbers]


@pytest.fixture
def work() -> Work:
    """Work that goes on at once."""
    return Work()


@pytest.fixture
async def batches(work: Work) -> AsyncIterator[Batches[int]]:
    """Batches of numbers."""
    batches = Batches(work.do)
    async with in_background("test", batches.run):
        yield batches


async def outcome(batches: Batches[int], number: int) -> Exception | None:
    """Return why a number was not done."""
    try:
        await batches.done(number)
    except (Refused, ZeroDivisionError, PostgresUnavailable) as error:
        return error
    return None


async def all_at_once(batches: Batches[int], work: Work, numbers: Sequence[int]) -> list[str]:
    """Have numbers arrive while the number 1 is done. Returns the names of their outcomes."""
    work.going_on.clear()
    first = asyncio.create_task(batches.done(1))
    await eventually(lambda: work.batches)
    others = [asyncio.create_task(outcome(batches, number)) for number in numbers]
    await asyncio.sleep(0)
    work.going_on.set()
    await first
    return [type(each).__name__ for each in await asyncio.gather(*others)]


async def test_item_that_arrives_alone_does_not_wait(batches: Batches[int], work: Work) -> None:
    await batches.done(1)
    await batches.done(2)

    assert work.batches == [[1], [2]]


async def test_items_that_arrive_meanwhile_make_the_next_batch(batches: Batches[int], work: Work) -> None:
    assert set(await all_at_once(batches, work, [2, 3, 4])) == {"NoneType"}

    assert work.batches == [[1], [2, 3, 4]]


async def test_batch_is_limited(batches: Batches[int], work: Work) -> None:
    await all_at_once(batches, work, range(100, 101 + LARGEST_BATCH))

    assert [len(batch) for batch in work.batches] == [1, LARGEST_BATCH, 1]


async def test_refused_item_refuses_no_other(batches: Batches[int], work: Work) -> None:
    assert await all_at_once(batches, work, [12, 13, 14]) == ["NoneType", "Refused", "NoneType"]

    assert work.batches == [[1], [12, 13, 14]]


async def test_item_at_fault_fails_alone(batches: Batches[int], work: Work) -> None:
    numbers = [*range(100, 227), 0, *range(227, 355)]

    outcomes = await all_at_once(batches, work, numbers)

    assert len(numbers) == LARGEST_BATCH
    assert [number for number, name in zip(numbers, outcomes, strict=True) if name != "NoneType"] == [0]
    assert outcomes[127] == "ZeroDivisionError"


async def test_outage_fails_the_whole_batch_after_one_attempt(batches: Batches[int], work: Work) -> None:
    assert set(await all_at_once(batches, work, [2, -1, 3])) == {"PostgresUnavailable"}

    assert work.batches == [[1], [2, -1, 3]]


async def test_outage_while_items_are_done_alone_fails_the_rest(batches: Batches[int], work: Work) -> None:
    outcomes = await all_at_once(batches, work, [2, 0, -1, 3, 4])

    assert outcomes == ["NoneType", "ZeroDivisionError", *["PostgresUnavailable"] * 3]
    assert work.batches == [[1], [2, 0, -1, 3, 4], [2], [0], [-1]]


async def test_item_whose_caller_has_left_is_not_done(batches: Batches[int], work: Work) -> None:
    work.going_on.clear()
    first = asyncio.create_task(batches.done(1))
    await eventually(lambda: work.batches)
    left = asyncio.create_task(batches.done(2))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.sleep(0)
    work.going_on.set()
    await first
    await batches.done(3)

    assert work.batches == [[1], [3]]
