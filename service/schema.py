"""The schema of the database: how it is applied, and how a process knows that it is recent enough."""

from collections.abc import Awaitable, Callable

import asyncpg

from service import postgres
from service.postgres import Connection, Pool, PostgresUnavailable

VERSION = 2
_LOCK = 0x5D17_0001  # any number of our own: who applies the schema holds it


class SchemaOutdated(Exception):
    """The database has an older schema than this release needs: run `python -m service schema apply`."""


async def apply(connection: Connection, statements: str) -> None:
    """Run the statements of schema.sql, one process at a time."""
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
        await connection.execute(statements)


async def check(connection: Connection) -> None:
    """Raise SchemaOutdated on too old a schema, PostgresUnavailable on a server that takes no writes."""
    try:
        row = await connection.fetchrow(
            """
            SELECT max(version) AS version,
                   current_setting('transaction_read_only')::boolean AS is_read_only
              FROM schema_version
            """
        )
    except asyncpg.UndefinedTableError:
        raise SchemaOutdated from None
    if row is None or (row["version"] or 0) < VERSION:
        raise SchemaOutdated
    if row["is_read_only"]:
        raise PostgresUnavailable


def readiness(pool: Pool, *, seconds: float) -> Callable[[], Awaitable[None]]:
    """Return a readiness check: Postgres answers and its schema is recent enough."""

    async def ready() -> None:
        async with postgres.connection(pool.reserve, seconds=seconds) as connection:
            await check(connection)

    return ready
