"""schema.sql: a database of an earlier version becomes one of this version, and stays in use meanwhile."""

import asyncpg
import httpx
import pytest

from service import schema
from service.postgres import Connection
from service.schema import SchemaOutdated
from tests.conftest import A_REQUEST, ROOT

_SCHEMA = (ROOT / "schema.sql").read_text()

# What version 2 has added.
_BACK_TO_VERSION_1 = """
    DROP INDEX calculation_request_listing;
    DROP INDEX calculation_request_external_id;
    DROP INDEX calculation_request_idempotency_key;
    ALTER TABLE api_key DROP COLUMN last_used_at;
    ALTER TABLE calculation_request DROP COLUMN idempotency_key, DROP COLUMN idempotency_sha256;
    ALTER TABLE email DROP COLUMN traceparent;
    DELETE FROM schema_version WHERE version > 1;
"""


async def shape(database: Connection) -> set[tuple[str, ...]]:
    """Return every column and index there is."""
    rows = await database.fetch(
        """
        SELECT table_name || '.' || column_name AS name,
               data_type || ' ' || is_nullable || ' ' || coalesce(column_default, '') AS definition
          FROM information_schema.columns
         WHERE table_schema = 'public'
         UNION ALL
        SELECT indexname, indexdef
          FROM pg_indexes
         WHERE schemaname = 'public'
        """
    )
    return {tuple(row) for row in rows}


async def test_database_of_version_1_is_upgraded_with_what_is_in_it(
    client: httpx.AsyncClient, database: Connection
) -> None:
    fresh = await shape(database)
    old = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
    await database.execute(_BACK_TO_VERSION_1)
    with pytest.raises(SchemaOutdated):
        await schema.check(database)

    await schema.apply(database, _SCHEMA)

    await schema.check(database)
    assert await shape(database) == fresh
    new = (await client.post("/v1/request", json=A_REQUEST, headers={"Idempotency-Key": "k"})).json()["data"]
    assert (await client.get("/v1/request")).json()["data"]["requests"] == [new, old]


async def test_schema_is_applied_again_while_a_backup_reads(database: Connection, database_url: str) -> None:
    backup = await asyncpg.connect(database_url)
    async with backup.transaction():
        for [table] in await backup.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"):
            await backup.execute(f"LOCK TABLE {table} IN ACCESS SHARE MODE")
        await database.execute("SET lock_timeout = '1s'")

        await schema.apply(database, _SCHEMA)
    await backup.close()
