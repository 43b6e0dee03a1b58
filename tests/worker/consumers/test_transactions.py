"""Transactions that are interrupted: by a connection without answers, or by a cancellation."""

import asyncio

import pytest

from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool, open_pool
from tests.harness.tcp_proxy import TcpProxy
from tests.worker.conftest import settings_with


async def test_transaction_on_a_connection_without_answers_ends_at_its_deadline(worker_settings):
    async with TcpProxy(worker_settings.database_url) as link:
        settings = settings_with(worker_settings, database_url=link.url)
        async with open_pool(settings) as pool:
            async with asyncio.timeout(30):  # Without a deadline this would wait for ever.
                with pytest.raises(PostgresUnavailable):
                    await _hold_connection_in_a_transaction(pool, link)
            link.resume()


async def _hold_connection_in_a_transaction(pool: Pool, link: TcpProxy) -> None:
    async with loans.transaction(pool, seconds=0.5) as connection:
        link.hold()
        await connection.execute("SELECT 1")


async def test_cancelled_transaction_leaves_nothing(worker_settings):
    async with open_pool(worker_settings) as pool:
        begun = asyncio.Event()

        async def work() -> None:
            async with loans.transaction(pool, seconds=30.0) as connection:
                await connection.execute("INSERT INTO conveyancer VALUES ('cancelled', 'Cancelled', false)")
                begun.set()
                await asyncio.Event().wait()

        working = asyncio.create_task(work())
        await begun.wait()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

        async with loans.Loan(pool, seconds=5.0) as connection:
            found = await connection.fetchval("SELECT count(*) FROM conveyancer WHERE id = 'cancelled'")
    assert found == 0
