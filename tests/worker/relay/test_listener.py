"""The listener receives NOTIFY, and notices a connection on which it cannot."""

import asyncio
from functools import partial

from service.outbox import lanes
from service.postgres import loans
from service.postgres.pool import Connection, Pool
from tests.harness.databases import is_gone
from tests.harness.in_process import running
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.worker.conftest import settings_with
from worker.relay.listener import Listener
from worker.settings import WorkerSettings

LISTENERS = """
    SELECT array_agg(pid)
      FROM pg_stat_activity
     WHERE datname = current_database()
       AND pid <> pg_backend_pid()
       AND application_name <> 'calculation-requests'
"""


async def test_notify_wakes_the_relay(worker_settings: WorkerSettings, database: Connection) -> None:
    woken = asyncio.Event()

    async with running(Listener(worker_settings, woken).run):
        await eventually(woken.is_set)  # by the listener's self-test
        woken.clear()
        await lanes.notify(database)
        await eventually(woken.is_set)


async def test_killed_connection_is_replaced_at_once_and_the_pool_is_not_affected(
    worker_settings: WorkerSettings, database: Connection, pool: Pool
) -> None:
    woken = asyncio.Event()
    pool_process = await process_of(pool)

    async with running(Listener(worker_settings, woken, check_seconds=600.0).run):
        await eventually(woken.is_set)
        (killed,) = await database.fetchval(LISTENERS)
        await database.execute("SELECT pg_terminate_backend($1)", killed)
        (successor,) = await eventually(partial(other_listeners, database, killed))
        woken.clear()
        await lanes.notify(database)
        await eventually(woken.is_set)

    assert successor != killed
    assert await process_of(pool) == pool_process


async def process_of(pool: Pool) -> int:
    """Return the pid of the Postgres process that serves the pool."""
    async with loans.connection(pool, seconds=5.0) as connection:
        process: int = await connection.fetchval("SELECT pg_backend_pid()")
    return process


async def other_listeners(database: Connection, killed: int) -> list[int]:
    """Return the pids of the listeners' Postgres processes, without *killed*."""
    return [process for process in await database.fetchval(LISTENERS) or [] if process != killed]


async def test_connection_that_has_gone_silent_is_replaced(
    worker_settings: WorkerSettings, postgres_link: TcpProxy, database: Connection
) -> None:
    settings = settings_with(
        worker_settings,
        database_url=postgres_link.url,
        database_timeout_seconds=0.5,
    )
    woken = asyncio.Event()

    async with running(Listener(settings, woken, check_seconds=0.1).run):
        await eventually(woken.is_set)
        (silent,) = await database.fetchval(LISTENERS)
        postgres_link.hold()
        await eventually(lambda: postgres_link.connections >= 3)
        woken.clear()
        postgres_link.resume()
        await eventually(woken.is_set)
        assert await other_listeners(database, silent)


async def test_connection_to_a_read_only_server_is_replaced(
    worker_settings: WorkerSettings, database: Connection
) -> None:
    name = await database.fetchval("SELECT current_database()")
    await database.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    woken = asyncio.Event()

    async with running(Listener(worker_settings, woken, check_seconds=0.1).run):
        (demoted,) = await eventually(partial(other_listeners, database, 0))
        await database.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
        await eventually(partial(other_listeners, database, demoted))
        woken.clear()
        await lanes.notify(database)
        await eventually(woken.is_set)


async def test_listener_connects_when_postgres_comes_up(
    worker_settings: WorkerSettings, postgres_link: TcpProxy
) -> None:
    woken = asyncio.Event()
    await postgres_link.refuse()

    async with running(Listener(settings_with(worker_settings, database_url=postgres_link.url), woken).run):
        await eventually(lambda: postgres_link.refused >= 3)
        postgres_link.admit()
        await eventually(woken.is_set)


async def test_stopped_listener_closes_its_connection(
    worker_settings: WorkerSettings, database: Connection
) -> None:
    woken = asyncio.Event()
    async with running(Listener(worker_settings, woken).run):
        await eventually(woken.is_set)
        (process,) = await database.fetchval(LISTENERS)

    await eventually(lambda: is_gone(database, process))
