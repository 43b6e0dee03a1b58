"""RETENTION_DAYS: what is older is erased, once, and nothing else."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import aio_pika
import msgspec
import pytest
from aio_pika.abc import AbstractChannel

from service.calculation_requests import storing
from service.calculation_requests.model import CalculationRequest
from service.identifiers import first_id_at
from service.outbox.lanes import LANES
from service.outbox.waker import RelayWaker
from service.postgres.pool import Connection, Pool
from tests.harness.in_process import running
from tests.harness.waiting import eventually
from tests.worker.conftest import created_body, settings_with, store
from tests.worker.operating.steps import intend
from tests.worker.operating.test_emails import assert_sound
from tests.worker.operating.test_erase import bury, dead_letters
from worker.operating.dead_letter_queues import held
from worker.rabbitmq.topology import NOTIFICATIONS
from worker.relay.lanes import lock_lanes
from worker.retention import Retention
from worker.settings import WorkerSettings

DAYS = 100


@pytest.fixture
def retention(worker_settings: WorkerSettings, pool: Pool) -> Retention:
    """The loop, whose rounds the tests make themselves."""
    return Retention(worker_settings, pool, RelayWaker(pool, timeout_seconds=5.0))


async def store_old(database: Connection, *, days: int, number: int, **fields: Any) -> CalculationRequest:
    """Store a request as one that was made days ago; the number makes its id unique."""
    made = await store(database, **fields)
    await database.execute("DELETE FROM calculation_request WHERE id = $1", made.id)
    await database.execute("DELETE FROM outbox WHERE request_id = $1", made.id)
    at = datetime.now(UTC) - timedelta(days=days)
    first = first_id_at(at)
    request = msgspec.structs.replace(made, id=type(first)(int=first.int + number), created_at=at)
    assert await storing.insert(database, request, traceparent=None)
    return request


async def kept(database: Connection) -> set[Any]:
    """Return the ids of the requests that are not erased."""
    return {row["id"] for row in await database.fetch("SELECT id FROM calculation_request")}


async def erased(database: Connection) -> int:
    """Return how many requests were erased."""
    number: int = await database.fetchval("SELECT count(*) FROM erased_request")
    return number


async def test_older_requests_and_their_dead_letters_are_erased(
    database: Connection, channel: AbstractChannel, retention: Retention
) -> None:
    old = [await store_old(database, days=DAYS + 1, number=number) for number in range(250)]
    young = [await store_old(database, days=DAYS - 1, number=number) for number in range(3)]
    for request in (old[0], young[0]):
        await bury(channel, NOTIFICATIONS, created_body(request))

    await retention.erase_old(days=DAYS)

    assert await kept(database) == {request.id for request in young}
    assert await erased(database) == len(old)
    assert await dead_letters(channel) == [created_body(young[0])]
    await assert_sound(database)


@pytest.mark.usefixtures("channel")
async def test_two_workers_erase_each_request_once(
    worker_settings: WorkerSettings, database: Connection, pool: Pool, retention: Retention
) -> None:
    for number in range(100):
        await store_old(database, days=DAYS + 1, number=number)
    another = Retention(worker_settings, pool, RelayWaker(pool, timeout_seconds=5.0))

    await asyncio.gather(retention.erase_old(days=DAYS), another.erase_old(days=DAYS))
    await retention.erase_old(days=DAYS)

    assert await kept(database) == set()
    assert await erased(database) == 100
    assert await database.fetchval("SELECT count(*) FROM outbox WHERE type = 'request.email_failed'") == 100
    await assert_sound(database)


@pytest.mark.usefixtures("channel")
async def test_lane_that_a_relay_holds_is_left_for_the_next_round(
    database: Connection, retention: Retention, other_connection: Connection
) -> None:
    for number in range(LANES):
        await store_old(database, days=DAYS + 1, number=number)

    async with other_connection.transaction():
        await lock_lanes(other_connection, [3])
        await retention.erase_old(days=DAYS)
        assert [request_id.int % LANES for request_id in await kept(database)] == [3]
    await retention.erase_old(days=DAYS)

    assert await kept(database) == set()


@pytest.mark.usefixtures("channel")
async def test_requests_of_a_held_lane_do_not_hold_up_later_ones_of_others(
    database: Connection, retention: Retention, other_connection: Connection
) -> None:
    for place in range(210):
        await store_old(database, days=DAYS + 2, number=3 + place * LANES)
    await store_old(database, days=DAYS + 1, number=4)

    async with other_connection.transaction():
        await lock_lanes(other_connection, [3])
        await retention.erase_old(days=DAYS)

    assert {request_id.int % LANES for request_id in await kept(database)} == {3}


@pytest.mark.usefixtures("channel")
@pytest.mark.parametrize(
    "locking",
    [
        "SELECT FROM calculation_request WHERE id = $1 FOR UPDATE",
        "SELECT FROM email WHERE request_id = $1 FOR UPDATE",
    ],
)
async def test_row_that_is_locked_holds_up_no_request_of_another_lane(
    database: Connection, retention: Retention, other_connection: Connection, locking: str
) -> None:
    locked, _ = [await store_old(database, days=DAYS + 1, number=number) for number in (3, 4)]
    await intend(database, locked)

    async with other_connection.transaction():
        await other_connection.execute(locking, locked.id)
        await retention.erase_old(days=DAYS)
        assert await kept(database) == {locked.id}
    await retention.erase_old(days=DAYS)

    assert await kept(database) == set()
    await assert_sound(database)


async def test_search_of_the_dead_letters_may_take_longer_than_a_unit_of_work(
    worker_settings: WorkerSettings, database: Connection, pool: Pool, channel: AbstractChannel
) -> None:
    request = await store_old(database, days=DAYS + 1, number=1)
    await bury(channel, NOTIFICATIONS, created_body(request))
    settings = settings_with(worker_settings, work_timeout_seconds=0.5)
    retention = Retention(settings, pool, RelayWaker(pool, timeout_seconds=5.0))

    async with await aio_pika.connect(worker_settings.amqp_url) as other, asyncio.TaskGroup() as group:
        async with held(other, NOTIFICATIONS, limit=1):
            erasing = group.create_task(retention.erase_old(days=DAYS))
            await asyncio.sleep(1.5)
            assert not erasing.done()
        await other.close()

    assert await dead_letters(channel) == []


@pytest.mark.usefixtures("channel")
async def test_clock_that_is_fast_erases_nothing_early(
    worker_settings: WorkerSettings, database: Connection, pool: Pool
) -> None:
    young = await store_old(database, days=DAYS - 1, number=1)
    waker = RelayWaker(pool, timeout_seconds=5.0)
    fast = Retention(worker_settings, pool, waker, clock=lambda: time.time() + 10 * 365 * 86_400)

    await fast.erase_old(days=DAYS)

    assert await kept(database) == {young.id}


async def test_nothing_is_erased_unless_asked_for(
    worker_settings: WorkerSettings, database: Connection, pool: Pool
) -> None:
    request = await store_old(database, days=10_000, number=1)
    waker = RelayWaker(pool, timeout_seconds=5.0)

    async with running(Retention(worker_settings, pool, waker, longest_rest_seconds=0.01).run):
        await asyncio.sleep(0.2)

    assert await kept(database) == {request.id}


@pytest.mark.usefixtures("channel")
async def test_rounds_begin_by_themselves(
    worker_settings: WorkerSettings, database: Connection, pool: Pool
) -> None:
    await store_old(database, days=40, number=1)
    settings = settings_with(worker_settings, retention_days=30)
    waker = RelayWaker(pool, timeout_seconds=5.0)

    async def all_are_erased() -> bool:
        return not await kept(database)

    async with running(Retention(settings, pool, waker, longest_rest_seconds=0.05).run):
        await eventually(all_are_erased)
