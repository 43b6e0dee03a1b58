"""RETENTION_DAYS: what is older is erased, once, and nothing else."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from service.calculation_requests.email_changes import FirstEmail, add_first
from tests.harness.in_process import running
from tests.harness.waiting import eventually
from tests.worker.conftest import settings_with, store_old
from tests.worker.steps import assert_sound
from worker import retention
from worker.process import ROLES

DAYS = 100


@pytest.fixture
def erase_old(worker_settings, pool, relay_waker):
    settings = settings_with(worker_settings, retention_days=DAYS)
    return lambda: retention.erase_old(settings, pool, relay_waker, asyncio.Event())


async def store(database, days: int, number: int = 0) -> UUID:
    """Store a request that was made so many days ago. Returns its id."""
    return (await store_old(database, datetime.now(UTC) - timedelta(days=days), number)).id


async def kept(database) -> set[UUID]:
    return {row["id"] for row in await database.fetch("SELECT id FROM calculation_request")}


async def test_two_workers_erase_each_older_request_once_and_no_other(database, erase_old):
    for number in range(10):
        await store(database, DAYS + 1, number)
    young = {await store(database, DAYS - 1, number) for number in range(3)}

    await asyncio.gather(erase_old(), erase_old())
    await erase_old()

    assert await kept(database) == young
    assert await database.fetchval("SELECT count(*) FROM erased_request") == 10
    assert await database.fetchval("SELECT count(*) FROM event WHERE type = 'request.email_failed'") == 10
    await assert_sound(database, found=["email_overdue"])  # Nothing sends the e-mails of the young.


async def test_round_erases_few_requests_and_the_oldest(database, erase_old):
    stored = [await store(database, DAYS + 20 - number) for number in range(12)]

    await erase_old()
    assert await kept(database) == set(stored[10:])
    await erase_old()

    assert await kept(database) == set()


async def test_nothing_is_erased_while_the_clocks_of_postgres_and_of_this_machine_differ(database):
    old = await store(database, DAYS + 1)
    before = await retention.find_oldest(database, DAYS)
    await database.execute(
        "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql "
        "RETURN pg_catalog.clock_timestamp() + interval '2 min'"
    )
    await database.execute("SET search_path = public, pg_catalog")

    assert before == [old]
    assert await retention.find_oldest(database, DAYS) == []


@pytest.mark.parametrize(
    ("table", "column"), [("calculation_request", "id"), ("email", "request_id"), ("outbox", "request_id")]
)
async def test_locked_row_holds_up_no_other_request(database, erase_old, other_connection, table, column):
    locked, _ = [await store(database, DAYS + 1, number) for number in (3, 4)]
    await add_first(database, [FirstEmail(locked)])

    async with other_connection.transaction():
        await other_connection.execute(f"SELECT FROM {table} WHERE {column} = $1 FOR UPDATE", locked)
        await erase_old()
        assert await kept(database) == {locked}
    await erase_old()

    assert await kept(database) == set()
    await assert_sound(database)


async def test_rounds_begin_by_themselves_if_asked_for(worker_settings, database, pool, relay_waker):
    await store(database, 40)
    assemble = ROLES["relay"].assemble
    of_role = [
        assemble(settings_with(worker_settings, retention_days=days), pool, relay_waker)[0]
        for days in (None, 30)
    ]

    assert "retention" not in of_role[0]
    async with running(of_role[1]["retention"]):
        await eventually(lambda: database.fetchval("SELECT count(*) = 0 FROM calculation_request"))
