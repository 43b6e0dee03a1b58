"""The connection pool: how many connections it opens, which it reuses, and what happens when one fails."""

import asyncio
import time
from contextlib import suppress

import asyncpg
import pytest
from msgspec.structs import replace
from yarl import URL

from service.postgres import connections
from service.postgres import pool as pool_module
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool, open_pool
from tests.harness.databases import is_gone
from tests.harness.metrics import rises
from tests.harness.waiting import eventually

SIZE = 2
BOTH = pytest.mark.parametrize("acquired", [connections.acquired, connections.transaction])


@pytest.fixture
async def pool(service_settings, link):
    """A pool of two connections, for which 64 callers may wait."""
    changes = {"database_url": link.url, "database_pool_size": SIZE, "database_timeout_seconds": 1.0}
    async with open_pool(replace(service_settings, **changes)) as opened:
        yield opened


async def backend(pool: Pool, statement: str = "", *, seconds: float = 5.0) -> int:
    """Run a statement; return the process id of the Postgres backend behind its connection."""
    async with connections.acquired(pool, seconds=seconds) as connection:
        if statement:
            await connection.execute(statement)
        return connection.get_server_pid()


async def is_sleeping(database: Connection) -> bool:
    sleeping = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
    return bool(await database.fetch(sleeping))


async def test_connections_are_reused_until_they_were_long_idle(pool, link, monkeypatch):
    before = await backend(pool)
    assert await backend(pool) == before
    assert (len(pool.opened), len(pool.idle)) == (1, 1)
    monkeypatch.setattr(pool_module, "_LONGEST_IDLE_SECONDS", 0.0)
    assert await backend(pool) != before
    assert len(pool.opened) == 1
    monkeypatch.undo()

    for _ in range(10):
        await asyncio.gather(*(backend(pool, "SELECT pg_sleep(0.01)") for _ in range(SIZE + 1)))
    assert (len(pool.opened), link.connections) == (SIZE, 1 + SIZE)


async def test_caller_beyond_the_full_queue_is_refused_at_once_and_one_that_waited_too_long_then(pool):
    async with connections.acquired(pool, seconds=5.0):
        async with connections.acquired(pool, seconds=5.0):
            late = asyncio.create_task(pool.acquire(queue_seconds=0.0))
            waiting = [asyncio.create_task(backend(pool)) for _ in range(63)]
            await asyncio.sleep(0)
            with pytest.raises(PostgresUnavailable):
                pool.check_available()
            refused = asyncio.create_task(backend(pool))
            await asyncio.sleep(0)  # one turn of the event loop
            assert isinstance(refused.exception(), PostgresUnavailable)
        with pytest.raises(TimeoutError):
            await late
        assert all(await asyncio.gather(*waiting)), "its connection is not lost"
    pool.check_available()


async def test_cancelled_caller_frees_its_place_and_closing_cancels_statements(service_settings, database):
    async with open_pool(replace(service_settings, database_pool_size=SIZE)) as pool:
        slow = await backend(pool)
        for _ in range(SIZE + 1):
            working = asyncio.create_task(backend(pool, "SELECT pg_sleep(30)", seconds=30.0))
            await eventually(lambda: is_sleeping(database))
            working.cancel()
            with pytest.raises(asyncio.CancelledError):
                await working
        await eventually(lambda: is_gone(database, slow))
        another = await backend(pool)
        connection = await pool.acquire(queue_seconds=1.0)
        working_on = asyncio.create_task(connection.execute("SELECT pg_sleep(30)"))
        await eventually(lambda: is_sleeping(database))

    await asyncio.gather(working_on, return_exceptions=True)
    await eventually(lambda: is_gone(database, another))


@BOTH
async def test_callers_are_refused_at_their_deadline_though_connections_do_not_answer(pool, link, acquired):
    async def work() -> None:
        async with acquired(pool, seconds=0.5) as connection:
            link.hold()
            await connection.execute("SELECT 1")

    await asyncio.gather(*(backend(pool, "SELECT pg_sleep(0.1)") for _ in range(SIZE)))
    async with asyncio.timeout(5.0):  # They would wait for the end of their statements for ever.
        outcomes = await asyncio.gather(*(work() for _ in range(SIZE)), return_exceptions=True)
    with pytest.raises(PostgresUnavailable):
        await backend(pool, seconds=0.1)

    assert [type(outcome) for outcome in outcomes] == [PostgresUnavailable] * SIZE
    # Opened, and to cancel the statements; no more until these have ended.
    assert (link.connections, len(pool.opened)) == (2 * SIZE, 0)
    link.resume()
    assert await backend(pool)


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("BEGIN", None),
        ("SELECT 1 / 0", None),
        ("SELECT 1", asyncpg.InternalClientError("another operation (2) is in progress")),
        ("SELECT 1", PostgresUnavailable()),  # e.g. on a read-only server, after a failover
    ],
)
async def test_session_in_doubt_is_not_lent_again(pool, statement, error):
    before = await backend(pool)
    with suppress(asyncpg.DivisionByZeroError, PostgresUnavailable):
        async with connections.acquired(pool, seconds=5.0) as connection:
            await connection.execute(statement)
            if error is not None:
                raise error

    assert await backend(pool) != before
    await eventually(lambda: len(pool.opened) == 1)


@BOTH
async def test_error_of_the_caller_keeps_the_connection_and_a_broken_one_is_replaced(pool, link, acquired):
    before = await backend(pool)
    with pytest.raises(LookupError):
        async with acquired(pool, seconds=5.0):
            raise LookupError
    assert await backend(pool) == before

    await link.cut()
    await eventually(lambda: len(pool.opened) == 0)
    assert await backend(pool) != before
    assert (len(pool.opened), len(pool.idle)) == (1, 1)


async def test_failed_connection_attempt_is_repeated_after_a_moment_not_at_once(pool, link):
    await link.refuse()
    for _ in range(20):
        with pytest.raises(PostgresUnavailable):
            await backend(pool)
    with pytest.raises(PostgresUnavailable):
        pool.check_available()
    assert link.refused == 1
    link.admit()

    async def is_reachable() -> bool:
        with suppress(PostgresUnavailable):
            return bool(await backend(pool))
        return False

    await eventually(is_reachable)
    pool.check_available()


async def test_caller_that_gives_up_while_it_connects_frees_its_place(pool, link):
    link.hold()
    for _ in range(SIZE):
        with pytest.raises(PostgresUnavailable):
            await backend(pool, seconds=0.1)

    link.resume()
    assert await backend(pool)


async def test_database_that_accepts_no_connections_is_unavailable(pool, administrator, database):
    name = await database.fetchval("SELECT current_database()")
    await administrator.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')

    with pytest.raises(PostgresUnavailable):
        await backend(pool)


async def test_callers_wait_a_bounded_time_when_postgres_accepts_no_more(service_settings, administrator):
    """The pool may open ten connections, and its Postgres user two, and then none."""
    user = f"limited_{time.time_ns()}"
    await administrator.execute(f"CREATE ROLE {user} LOGIN PASSWORD 'limited' CONNECTION LIMIT 2")
    url = str(URL(service_settings.database_url).with_user(user).with_password("limited"))
    settings = replace(service_settings, database_url=url, database_pool_size=10)
    async with open_pool(settings) as pool:
        await backend(pool)
        with rises("postgres_unavailable_total", by=0):
            work = [backend(pool, "SELECT pg_sleep(0.05)", seconds=10.0) for _ in range(20)]
            assert len(set(await asyncio.gather(*work))) == 2
        assert (len(pool.opened), len(pool.idle)) == (2, 2)
        async with connections.acquired(pool, seconds=30.0) as one:
            async with connections.acquired(pool, seconds=30.0) as other:
                with pytest.raises(PostgresUnavailable):
                    await asyncio.wait_for(backend(pool, seconds=0.2), 30)
                # Callers fail at once when the connections close that they wait for.
                waiting = [asyncio.create_task(backend(pool, seconds=30.0)) for _ in range(3)]
                await administrator.execute(f"ALTER ROLE {user} CONNECTION LIMIT 0")
                other.terminate()
            assert not any(task.done() for task in waiting)
            one.terminate()
        outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    await administrator.execute(f"DROP ROLE {user}")

    assert [type(outcome) for outcome in outcomes] == [PostgresUnavailable] * 3
