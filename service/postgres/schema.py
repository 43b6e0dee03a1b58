"""The database schema: applies its numbered versions, and checks that it is recent enough.

Versions are applied while requests are stored: indexes are built concurrently, and a table's lock is given up
after 200 ms and tried again. schema.sql is their sum.

Not Alembic or yoyo: they bring SQLAlchemy or a second driver, and neither gives up waiting for a table's lock
while callers queue behind it.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import resources

import asyncpg
import msgspec

from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool

_FOLDER = resources.files("service.postgres") / "versions"
_FILES = sorted(file.name for file in _FOLDER.iterdir() if file.name.endswith(".sql"))
VERSION = len(_FILES)  # the version this release needs

_LOCK = 0x5D17_0001  # key of the advisory lock held while applying the schema; an arbitrary number
_ATTEMPTS = 600  # to get that lock, and to get a table's lock
_PAUSE_SECONDS = 1.0  # between two attempts
# Statements queue behind an ALTER TABLE that waits for its lock, and their callers time out after a second.
_LOCK_WAIT = "200ms"
# A concurrent index build waits for open transactions, and nothing queues behind it.
_CONCURRENT_LOCK_WAIT = "1h"


class SchemaOutdated(Exception):
    """The database schema is older than this release needs: run `python -m service schema apply`."""


class SchemaBusy(Exception):
    """The schema is in use: end the long transaction in pg_stat_activity, then run `schema apply` again."""


class Version(msgspec.Struct, frozen=True):
    """One step of the schema: an SQL file that ends by recording its number.

    It is one transaction, unless it says CONCURRENTLY, which Postgres rejects in a transaction. Such a file
    runs statement by statement, so each of its statements must be safe to repeat after an interruption.
    """

    number: int
    sql: str

    @property
    def parts(self) -> list[str]:
        """The SQL to execute string by string; the statements of one string are one transaction."""
        return re.split(r"(?<=;)\n", self.sql.strip()) if "CONCURRENTLY" in self.sql else [self.sql]


def versions() -> list[Version]:
    """Return every version in order, starting from an empty database."""
    found = [Version(int(name.partition("_")[0]), (_FOLDER / name).read_text()) for name in _FILES]
    if [version.number for version in found] != list(range(1, VERSION + 1)):
        raise AssertionError(f"versions must be numbered 1, 2, 3 …: {_FILES}")
    return found


async def apply(connection: Connection) -> int:
    """Apply the missing versions, each once, while the database is in use; return its version afterwards.

    A database at this version or a newer one is neither locked nor changed. The connection must be direct: a
    transaction pooler would lose the lock.

    Raises SchemaBusy.
    """
    if await read_version(connection) < VERSION:
        async with _lock_held(connection):
            for version in versions()[await read_version(connection) :]:
                await _apply(connection, version)
    return await read_version(connection)


async def read_version(connection: Connection) -> int:
    """Return the version of the database schema, 0 if there is none."""
    try:
        return await connection.fetchval("SELECT max(version) FROM schema_version") or 0
    except asyncpg.UndefinedTableError:
        return 0


async def check(connection: Connection) -> None:
    """Raise SchemaOutdated on too old a schema, PostgresUnavailable on a read-only server."""
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
        raise PostgresUnavailable.counted()


def readiness(pool: Pool, *, seconds: float) -> Callable[[], Awaitable[None]]:
    """Return a readiness check: Postgres answers, accepts writes, and its schema is recent enough."""

    async def ready() -> None:
        async with loans.connection(pool.reserve, seconds=seconds) as connection:
            await check(connection)

    return ready


@asynccontextmanager
async def _lock_held(connection: Connection) -> AsyncIterator[None]:
    """Hold the lock that keeps other processes from applying the schema. Raises SchemaBusy."""
    for _ in range(_ATTEMPTS):
        # Not pg_advisory_lock: a concurrent index build would wait for the snapshot of that statement.
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
    """Apply a version; start it again when a table stays locked. Raises SchemaBusy.

    An interrupted concurrent index build leaves an invalid index, which the part before it drops.
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
