"""The schema of the database: how it is applied, and how a process knows that it is recent enough.

Its own few lines, because no kept library served: Alembic and yoyo bring SQLAlchemy or a second driver, and
neither gives up a table's lock for which callers queue.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import resources

import asyncpg
import msgspec

from service.postgres import loans, outages
from service.postgres.pool import Connection, Pool

_FOLDER = resources.files("service.postgres") / "versions"
_FILES = sorted(file.name for file in _FOLDER.iterdir() if file.name.endswith(".sql"))
VERSION = len(_FILES)  # that this release needs

_LOCK = 0x5D17_0001  # any number of our own: the process that applies the schema holds it
_ATTEMPTS = 600  # to get that lock, and to get a table's
_PAUSE_SECONDS = 1.0  # between two attempts
# Statements queue behind an ALTER TABLE that waits for its lock, and their callers wait a second at most.
_LOCK_WAIT = "200ms"
# A concurrent index waits for open transactions, and nothing queues behind it.
_CONCURRENT_LOCK_WAIT = "1h"


class SchemaOutdated(Exception):
    """The database has an older schema than this release needs: run `python -m service schema apply`."""


class SchemaBusy(Exception):
    """The schema is in use: end the long transaction in pg_stat_activity, then run `schema apply` again."""


class Version(msgspec.Struct, frozen=True):
    """The step from one schema to the next: a file of SQL, which ends with the record of its number.

    It is one transaction, unless it says CONCURRENTLY, which Postgres refuses in one. Such a file runs
    statement by statement, so each of its statements can be repeated after an interruption.
    """

    number: int
    sql: str

    @property
    def parts(self) -> list[str]:
        """The strings of SQL to execute one by one; several statements in one string are one transaction."""
        return re.split(r"(?<=;)\n", self.sql.strip()) if "CONCURRENTLY" in self.sql else [self.sql]


def versions() -> list[Version]:
    """Return every version, in order, from an empty database on."""
    found = [Version(int(name.partition("_")[0]), (_FOLDER / name).read_text()) for name in _FILES]
    if [version.number for version in found] != list(range(1, VERSION + 1)):
        raise AssertionError(f"versions must be numbered 1, 2, 3 …: {_FILES}")
    return found


async def apply(connection: Connection) -> int:
    """Apply the versions that the database lacks, each once, while it is in use; return the one it has then.

    A database of this version or a newer one is left alone: no lock, no change. The connection must be a
    direct one: a transaction pooler would lose the lock.

    Raises SchemaBusy.
    """
    if await read_version(connection) < VERSION:
        async with _alone(connection):
            for version in versions()[await read_version(connection) :]:
                await _apply(connection, version)
    return await read_version(connection)


async def read_version(connection: Connection) -> int:
    """Return the version of the database's schema, 0 if it has none."""
    try:
        return await connection.fetchval("SELECT max(version) FROM schema_version") or 0
    except asyncpg.UndefinedTableError:
        return 0


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
        raise outages.unavailable()


def readiness(pool: Pool, *, seconds: float) -> Callable[[], Awaitable[None]]:
    """Return a readiness check: Postgres answers and its schema is recent enough."""

    async def ready() -> None:
        async with loans.connection(pool.reserve, seconds=seconds) as connection:
            await check(connection)

    return ready


@asynccontextmanager
async def _alone(connection: Connection) -> AsyncIterator[None]:
    """Keep every other process from applying the schema. Raises SchemaBusy."""
    for _ in range(_ATTEMPTS):
        # Not pg_advisory_lock: a concurrent index would wait for the snapshot of the statement that waits.
        if await connection.fetchval("SELECT pg_try_advisory_lock($1)", _LOCK):
            break
        await asyncio.sleep(_PAUSE_SECONDS)
    else:
        raise SchemaBusy
    try:
        yield
    finally:
        if not connection.is_closed():
            await connection.execute(f"RESET lock_timeout; SELECT pg_advisory_unlock({_LOCK})")


async def _apply(connection: Connection, version: Version) -> None:
    """Apply a version, from its beginning again after a table that is in use. Raises SchemaBusy.

    A concurrent index that was given up is left behind, invalid: the part before it drops it.
    """
    for _ in range(_ATTEMPTS):
        try:
            for part in version.parts:
                lock_wait = _CONCURRENT_LOCK_WAIT if "CONCURRENTLY" in part else _LOCK_WAIT
                await connection.execute(f"SET lock_timeout = '{lock_wait}'")
                await connection.execute(part)
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
            await asyncio.sleep(_PAUSE_SECONDS)
        else:
            return
    raise SchemaBusy
