"""Which errors of Postgres are outages."""

import asyncpg
import pytest

from service.postgres.outages import is_outage


async def test_database_that_accepts_no_connections_is_out(administrator, database, database_url):
    name = await database.fetchval("SELECT current_database()")
    await administrator.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')

    with pytest.raises(asyncpg.PostgresError) as refused:
        await asyncpg.connect(database_url)

    assert is_outage(refused.value)
