"""The locks of the lanes are kept during a long publish, and their loss is noticed."""

import pytest

from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from worker.relay.lanes import lanes_kept, lock_lanes

LANE = 0


async def test_locks_outlast_the_time_after_which_postgres_ends_a_silent_transaction(
    database: Connection, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.relay.lanes._PING_SECONDS", 0.1)
    async with loans.transaction(pool, seconds=10.0) as connection:
        await connection.execute("SET LOCAL idle_in_transaction_session_timeout = '1s'")
        await lock_lanes(connection, [LANE])

        async with lanes_kept(connection):
            await database.execute("SELECT pg_sleep(1.5)")

        locked_meanwhile = (await lock_lanes(database, [LANE])).lanes

    assert locked_meanwhile == []


async def test_loss_of_the_locks_ends_the_block_and_is_an_outage(database: Connection, pool: Pool) -> None:
    with pytest.raises(PostgresUnavailable):
        await _lose_locks(database, pool)


async def _lose_locks(database: Connection, pool: Pool) -> None:
    async with loans.transaction(pool, seconds=10.0) as connection:
        process = await connection.fetchval("SELECT pg_backend_pid()")
        async with lanes_kept(connection) as lost:
            await database.execute("SELECT pg_terminate_backend($1)", process)
            await lost.wait()
