"""Group commit: which callers share a transaction, and what each one gets when something fails."""

import asyncio
import time
from collections.abc import Iterable

import asyncpg
import msgspec
import pytest

from service.postgres import connections
from service.postgres.group_commit import LARGEST_GROUP, GroupCommit
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool, open_pool
from tests.harness import databases
from tests.harness.databases import has_waiting_statement
from tests.harness.waiting import eventually

SECONDS = 5.0
QUEUE_SIZE = 32  # of a pool with one connection
INSERT = """
    INSERT INTO stored (id, note)
    SELECT $1, $2
     WHERE $2 <> 'nothing'
    RETURNING id
    """


class Callers:
    """The callers of a group commit: each has *seconds* from its call on."""

    def __init__(self, pool: Pool, *, seconds: float) -> None:
        self._group_commit = GroupCommit(pool, INSERT, seconds=seconds)
        self._seconds = seconds

    async def execute(self, row_id: int, note: str) -> bool:
        """Store a row; return whether it was stored."""
        until = time.monotonic() + self._seconds
        return await self._group_commit.execute(row_id, (row_id, note), until=until) is not None


@pytest.fixture(autouse=True)
async def table(database):
    await database.execute("CREATE TABLE stored (id int PRIMARY KEY, note text CHECK (note <> 'refused'))")
    await database.execute(f"GRANT ALL ON stored TO {databases.user_of('api')}")


@pytest.fixture
async def group_commit(pool, statements):
    """A group commit whose statement is already prepared."""
    await Callers(pool, seconds=SECONDS).execute(0, "")
    statements.clear()
    return Callers(pool, seconds=SECONDS)


async def store(group_commit: Callers, notes: Iterable[str]) -> list[bool | BaseException]:
    """Store all *notes* concurrently, under the ids 1, 2 and so on."""
    storing = (group_commit.execute(number, note) for number, note in enumerate(notes, 1))
    return await asyncio.gather(*storing, return_exceptions=True)


def started(group_commit: Callers, *ids: int) -> list[asyncio.Task[bool]]:
    """Start callers, which store these ids from the next turn of the event loop on. The first one leads."""
    return [asyncio.create_task(group_commit.execute(each, "a")) for each in ids]


async def stored(database: Connection) -> list[int]:
    return [row["id"] for row in await database.fetch("SELECT id FROM stored WHERE id > 0 ORDER BY id")]


async def test_concurrent_callers_share_a_round_trip_and_a_transaction(group_commit, database, statements):
    outcomes = await store(group_commit, ["a", "a", "nothing", "a", "a"])

    assert outcomes == [True, True, False, True, True]
    assert await stored(database) == [1, 2, 4, 5]
    assert (len(statements.executed), statements.round_trips) == (5, 1)
    transactions = "SELECT count(DISTINCT xmin::text) FROM stored WHERE id > 0"
    assert await database.fetchval(transactions) == 1

    statements.clear()
    await store(group_commit, ["nothing"] * (LARGEST_GROUP + 1))
    assert statements.round_trips == 2


@pytest.mark.parametrize("statement_cache_size", [0, 100])
@pytest.mark.parametrize(
    ("note", "error"), [("refused", asyncpg.CheckViolationError), ("\ud800", asyncpg.DataError)]
)
async def test_rejected_arguments_fail_the_group_and_leave_no_transaction_open(
    service_settings, database, note, error, statement_cache_size
):
    """Without a statement cache asyncpg has begun a transaction by then, and does not end it."""
    others = "SELECT count(xact_start) FROM pg_stat_activity WHERE datname = current_database() AND pid <> $1"

    async def no_transaction_is_open() -> bool:
        return not await database.fetchval(others, database.get_server_pid())

    changes = {"database_statement_cache_size": statement_cache_size, "database_pool_size": 1}
    async with open_pool(msgspec.structs.replace(service_settings, **changes)) as pool:
        group_commit = Callers(pool, seconds=SECONDS)
        outcomes = await store(group_commit, ["a", note, "a"])
        await eventually(no_transaction_is_open)
        assert await store(group_commit, ["a", "a"]) == [True, True]

    assert [type(outcome) for outcome in outcomes] == [error, PostgresUnavailable, PostgresUnavailable]
    assert await stored(database) == [1, 2]


@pytest.mark.parametrize(
    "notes",
    [["a"] * 5, ["a" * 2_000_000] * LARGEST_GROUP],
    ids=["Postgres does not answer", "Postgres reads no more input"],
)
async def test_whole_group_fails_in_time_and_the_next_is_served(group_commit, pool, link, notes):
    await group_commit.execute(0, "nothing")  # connects
    impatient = Callers(pool, seconds=1.0)
    link.hold()
    async with asyncio.timeout(30):  # Without a deadline, of asyncpg's own for input, this would never end.
        outcomes = await store(impatient, notes)
    link.resume()

    assert [type(outcome) for outcome in outcomes] == [PostgresUnavailable] * len(notes)
    await link.cut()

    async def serves_again() -> bool:
        return await store(impatient, ["nothing"]) == [False]

    await eventually(serves_again)


async def test_followers_count_in_the_queue_and_are_refused_when_it_is_full(group_commit, pool, database):
    async with connections.acquired(pool, seconds=SECONDS):
        waiting = started(group_commit, *range(1, QUEUE_SIZE + 1))
        await asyncio.sleep(0)
        with pytest.raises(PostgresUnavailable):
            pool.check_available()
        with pytest.raises(PostgresUnavailable):
            await group_commit.execute(QUEUE_SIZE + 1, "a")
    await asyncio.gather(*waiting)

    pool.check_available()
    assert await stored(database) == list(range(1, QUEUE_SIZE + 1))


async def test_cancelled_follower_stores_nothing(group_commit, pool, database):
    async with connections.acquired(pool, seconds=SECONDS):
        leader, follower = started(group_commit, 1, 2)
        await asyncio.sleep(0)
        follower.cancel()

    assert await leader
    assert follower.cancelled()
    assert await stored(database) == [1]


async def test_caller_does_not_join_a_leader_that_was_cancelled_while_it_waited(group_commit, pool):
    async with connections.acquired(pool, seconds=SECONDS):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(group_commit.execute(1, "a"), 0.01)
        other = asyncio.create_task(group_commit.execute(2, "a"))
        await asyncio.sleep(0)

    assert await asyncio.wait_for(other, SECONDS)


async def test_leader_cancelled_in_the_statement_fails_followers(group_commit, pool, database, statements):
    async def has_ended() -> bool:
        return not await has_waiting_statement(database)  # Postgres has read that it is cancelled.

    async with database.transaction():
        await database.execute("LOCK TABLE stored")
        leader, follower = started(group_commit, 1, 2)
        await eventually(lambda: statements.round_trips == 1)
        leader.cancel()
        with pytest.raises(PostgresUnavailable):
            await follower
        await eventually(has_ended)

    assert leader.cancelled()
    assert await group_commit.execute(3, "a")
    assert await stored(database) == [3]
    assert (len(pool.opened), len(pool.idle)) == (1, 1)


async def test_late_callers_do_not_join_a_leader_that_has_waited_long(pool, database):
    group_commit = Callers(pool, seconds=2.0)
    async with connections.acquired(pool, seconds=SECONDS):
        first = started(group_commit, 1, 2)
        await asyncio.sleep(0.6)  # of the two seconds; the leader waits for one
        late = started(group_commit, 3, 4)
        await asyncio.sleep(0)

    assert await asyncio.gather(*first, *late) == [True] * 4
    transactions = "SELECT array_agg(id) FROM stored GROUP BY xmin::text ORDER BY min(id)"
    assert [sorted(ids) for (ids,) in await database.fetch(transactions)] == [[1, 2], [3, 4]]
