"""RETENTION_DAYS: what is older is erased, once, and nothing else."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from tests.harness.in_process import running
from tests.harness.waiting import eventually
from tests.worker.conftest import settings_with, store_old
from tests.worker.steps import assert_sound, intend
from worker import retention
from worker.process import ROLES

DAYS = 100


@pytest.fixture
def erase_old(worker_settings, pool, relay_waker):
    settings = settings_with(worker_settings, retention_days=DAYS)
    return lambda: retention.erase_old(settings, pool, relay_waker, asyncio.Event())


def days_ago(number: int) -> datetime:
    return datetime.now(UTC) - timedelta(days=number)


async def kept(database) -> set[UUID]:
    return {row["id"] for row in await database.fetch("SELECT id FROM calculation_request")}


async def test_two_workers_erase_each_older_request_once_and_no_other(database, erase_old):
    for number in range(10):
        await store_old(database, days_ago(DAYS + 1), number)
    young = [await store_old(database, days_ago(DAYS - 1), number) for number in range(3)]

    await asyncio.gather(erase_old(), erase_old())
    await erase_old()

    assert await kept(database) == {request.id for request in young}
    assert await database.fetchval("SELECT count(*) FROM erased_request") == 10
    assert await database.fetchval("SELECT count(*) FROM event WHERE type = 'request.email_failed'") == 10
    await assert_sound(database, found=["email_overdue"])  # Nothing sends the e-mails of the young.


async def test_round_erases_few_requests_and_the_oldest(database, erase_old):
    stored = [await store_old(database, days_ago(DAYS + 20 - number)) for number in range(12)]

    await erase_old()
    assert await kept(database) == {request.id for request in stored[10:]}
    await erase_old()

    assert await kept(database) == set()


async def test_nothing_is_erased_while_the_clocks_of_postgres_and_of_this_machine_differ(database):
    old = await store_old(database, days_ago(DAYS + 1))
    before = await retention.find_oldest(database, DAYS)
    await database.execute(
        "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql "
        "RETURN pg_catalog.clock_timestamp() + interval '2 min'"
    )
    await database.execute("SET search_path = public, pg_catalog")

    assert before == [old.id]
    assert await retention.find_oldest(database, DAYS) == []


@pytest.mark.parametrize(
    ("table", "column"), [("calculation_request", "id"), ("email", "request_id"), ("outbox", "request_id")]
)
async def test_locked_row_holds_up_no_other_request(database, erase_old, other_connection, table, column):
    locked, _ = [await store_old(database, days_ago(DAYS + 1), number) for number in (3, 4)]
    await intend(database, locked)

    async with other_connection.transaction():
        await other_connection.execute(f"SELECT FROM {table} WHERE {column} = $1 FOR UPDATE", locked.id)
        await erase_old()
        assert await kept(database) == {locked.id}
    await erase_old()

    assert await kept(database) == set()
    await assert_sound(database)


@pytest.mark.parametrize("days", [None, 30])
async def test_rounds_begin_by_themselves_if_asked_for(worker_settings, database, pool, relay_waker, days):
    await store_old(database, days_ago(40), 1)
    settings = settings_with(worker_settings, retention_days=days)
    parts, *_ = ROLES["relay"].assemble(settings, pool, relay_waker)

    assert ("retention" in parts) is (days is not None)
    if days is not None:
        async with running(parts["retention"]):
            await eventually(lambda: database.fetchval("SELECT count(*) = 0 FROM calculation_request"))
