"""The locks of the lanes are kept during a long publish, and their loss is noticed."""

import inspect
from datetime import datetime
from functools import partial

import pytest

from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from tests.harness.waiting import eventually
from worker.relay.lanes import lanes_kept, lock_lanes

LANE = 0


async def test_transaction_is_not_silent_while_it_keeps_its_locks(database: Connection, pool: Pool) -> None:
    """Postgres would end one that is silent for loans.SILENCE_SECONDS; not this one, on a slow machine."""
    async with loans.connection(pool, seconds=30.0) as connection, connection.transaction():
        await lock_lanes(connection, [LANE])
        process = connection.get_server_pid()

        async with lanes_kept(connection, ping_seconds=0.05):
            for _ in range(3):
                latest = await last_statement_at(database, process)
                await eventually(partial(is_later, database, process, latest))
        locked_meanwhile = (await lock_lanes(database, [LANE])).lanes

    assert locked_meanwhile == []


async def last_statement_at(database: Connection, process: int) -> datetime:
    """Return when a process of Postgres got its last statement."""
    latest: datetime = await database.fetchval(
        "SELECT query_start FROM pg_stat_activity WHERE pid = $1", process
    )
    return latest


async def is_later(database: Connection, process: int, moment: datetime) -> bool:
    """Whether a process of Postgres has got a statement since."""
    return await last_statement_at(database, process) > moment


def test_pings_come_twice_or_more_in_the_time_after_which_postgres_ends_a_silent_transaction() -> None:
    default = inspect.signature(lanes_kept).parameters["ping_seconds"].default

    assert default <= loans.SILENCE_SECONDS / 2


async def test_loss_of_the_locks_ends_the_block_and_is_an_outage(database: Connection, pool: Pool) -> None:
    with pytest.raises(PostgresUnavailable):
        await _lose_locks(database, pool)


async def _lose_locks(database: Connection, pool: Pool) -> None:
    async with loans.transaction(pool, seconds=10.0) as connection:
        process = await connection.fetchval("SELECT pg_backend_pid()")
        async with lanes_kept(connection) as lost:
            await database.execute("SELECT pg_terminate_backend($1)", process)
            await lost.wait()
