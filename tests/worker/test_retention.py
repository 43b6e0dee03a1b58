"""RETENTION_DAYS: what is older is erased, once, and nothing else."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from service.calculation_requests.model import CalculationRequest
from service.identifiers import first_id_at
from service.outbox.lanes import LANES, RelayWaker, try_lock
from service.postgres.pool import Connection
from tests.harness import stored
from tests.harness.in_process import running
from tests.harness.waiting import eventually
from tests.worker.commands.steps import assert_sound, intend
from tests.worker.conftest import settings_with, store
from worker.process import Worker
from worker.retention import Retention

DAYS = 100


@pytest.fixture
def retention(worker_settings, pool):
    """Its rounds are made by the tests."""
    return Retention(worker_settings, pool, RelayWaker(pool, seconds=5.0), days=DAYS)


async def store_old(database: Connection, *, days: int, number: int, **fields: Any) -> CalculationRequest:
    """Store a request as one that was made days ago; the number makes its id unique."""
    made = await store(database, **fields)
    await database.execute("DELETE FROM calculation_request WHERE id = $1", made.id)
    await database.execute("DELETE FROM outbox WHERE request_id = $1", made.id)
    at = datetime.now(UTC) - timedelta(days=days)
    first = first_id_at(at)
    request = msgspec.structs.replace(made, id=type(first)(int=first.int + number), created_at=at)
    assert await stored.insert(database, request, traceparent=None)
    return request


async def kept(database):
    return {row["id"] for row in await database.fetch("SELECT id FROM calculation_request")}


async def erased(database):
    number: int = await database.fetchval("SELECT count(*) FROM erased_request")
    return number


async def test_older_requests_are_erased(database, retention):
    old = [await store_old(database, days=DAYS + 1, number=number) for number in range(250)]
    young = [await store_old(database, days=DAYS - 1, number=number) for number in range(3)]

    await retention.erase_old(datetime.now(UTC))

    assert await kept(database) == {request.id for request in young}
    assert await erased(database) == len(old)
    await assert_sound(database)


async def test_two_workers_erase_each_request_once(database, retention):
    for number in range(100):
        await store_old(database, days=DAYS + 1, number=number)

    await asyncio.gather(*(retention.erase_old(datetime.now(UTC)) for _ in range(2)))
    await retention.erase_old(datetime.now(UTC))

    assert await kept(database) == set()
    assert await erased(database) == 100
    assert await database.fetchval("SELECT count(*) FROM outbox WHERE type = 'request.email_failed'") == 100
    await assert_sound(database)


async def test_lane_that_a_relay_holds_is_left_for_the_next_round(database, retention, other_connection):
    for number in range(LANES):
        await store_old(database, days=DAYS + 1, number=number)

    async with other_connection.transaction():
        await try_lock(other_connection, [3])
        await retention.erase_old(datetime.now(UTC))
        assert [request_id.int % LANES for request_id in await kept(database)] == [3]
    await retention.erase_old(datetime.now(UTC))

    assert await kept(database) == set()


async def test_requests_of_a_held_lane_do_not_hold_up_later_ones_of_others(
    database, retention, other_connection
):
    for place in range(210):
        await store_old(database, days=DAYS + 2, number=3 + place * LANES)
    await store_old(database, days=DAYS + 1, number=4)

    async with other_connection.transaction():
        await try_lock(other_connection, [3])
        await retention.erase_old(datetime.now(UTC))

    assert {request_id.int % LANES for request_id in await kept(database)} == {3}


@pytest.mark.parametrize(
    "locking",
    [
        "SELECT FROM calculation_request WHERE id = $1 FOR UPDATE",
        "SELECT FROM email WHERE request_id = $1 FOR UPDATE",
    ],
)
async def test_row_that_is_locked_holds_up_no_request_of_another_lane(
    database, retention, other_connection, locking
):
    locked, _ = [await store_old(database, days=DAYS + 1, number=number) for number in (3, 4)]
    await intend(database, locked)

    async with other_connection.transaction():
        await other_connection.execute(locking, locked.id)
        await retention.erase_old(datetime.now(UTC))
        assert await kept(database) == {locked.id}
    await retention.erase_old(datetime.now(UTC))

    assert await kept(database) == set()
    await assert_sound(database)


async def test_clock_that_is_fast_erases_nothing_early(database, retention):
    young = await store_old(database, days=DAYS - 1, number=1)

    await retention.erase_old(datetime.now(UTC) + timedelta(days=3650))

    assert await kept(database) == {young.id}


@pytest.mark.parametrize("days", [None, 30])
async def test_rounds_begin_by_themselves_if_asked_for(worker_settings, database, pool, days):
    await store_old(database, days=40, number=1)
    settings = settings_with(worker_settings, retention_days=days)
    parts = Worker(settings, pool, frozenset({"relay"}), RelayWaker(pool, seconds=5.0)).parts

    assert ("retention" in parts) is (days is not None)
    if days is not None:
        async with running(parts["retention"]):
            await eventually(lambda: is_empty(database))


async def is_empty(database):
    return not await kept(database)
