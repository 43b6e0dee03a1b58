"""The database schema: installs schema.sql in an empty database, and upgrades an existing one.

Versions after the first release are numbered files. They are applied while requests are stored. So indexes
are built concurrently, and an attempt to lock a table ends after 200 ms and is repeated.

Alembic and yoyo are not used, because they bring SQLAlchemy or a second driver, and neither stops waiting
for a table's lock while callers queue behind it.
"""

import asyncio
import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg

from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool

_SCHEMA = Path(__file__).parents[2] / "schema.sql"  # beside the package, in a checkout and in the image
_ROLES = Path(__file__).with_name("roles.sql")

_NO_SHORT_TIMEOUT = r"0|[5-9]\d{3}|\d{5,}"  # in milliseconds: at least 5 s, a worker's default deadline
# Settings that a session takes over from role, database or server, and the accepted values, the usual one
# first. With others, a call could fail for the isolation of its session, or a crash could undo what was
# answered. A session does not set them itself, because transaction poolers refuse that.
_SETTINGS = {
    "server_encoding": "UTF8",
    "default_transaction_isolation": "read committed|read uncommitted",
    "synchronous_commit": "on|remote_write|remote_apply",
    "statement_timeout": _NO_SHORT_TIMEOUT,
    "lock_timeout": _NO_SHORT_TIMEOUT,
    "transaction_timeout": _NO_SHORT_TIMEOUT,  # from Postgres 17 on
}

_LOCK = "23831, 1"  # keys of the advisory lock held while applying the schema. Creates lock single numbers
_ATTEMPTS = 600  # while a table is locked, or another process applies the schema
_PAUSE_SECONDS = 1.0  # between two attempts


class SchemaOutdated(Exception):
    """The database schema is older than this release needs: run `python -m service schema apply`."""


class UnfitSetting(SchemaOutdated):
    """A setting of the database, role or server with which the service does not work."""


def read_versions(folder: Path) -> list[str]:
    """Return the SQL of the versions in a folder, 0002_…sql, 0003_…sql, in order."""
    return [file.read_text() for file in sorted(folder.glob("*.sql"))]


_VERSIONS = read_versions(Path(__file__).parent / "versions")
VERSION = 1 + len(_VERSIONS)  # the version this release needs, which schema.sql has

# Until the first release, schema.sql changes without a new version. So a database made from another
# schema.sql is recognized by this fingerprint of it, without comments and spaces.
_FINGERPRINT = hashlib.sha256(re.sub(r"--.*|\s", "", _SCHEMA.read_text()).encode()).hexdigest()


async def apply(connection: Connection, versions: Sequence[str] = _VERSIONS) -> int:
    """Upgrade a database, which may be in use, to the newest version. Returns its version afterwards.

    An empty database gets schema.sql. Then missing versions are applied, each once. Finally roles.sql grants
    rights. A database at a newer version is not changed. The connection must be direct, because a transaction
    pooler would lose the lock. Raises SchemaOutdated if the schema cannot be applied.
    """
    await check_settings(connection)
    for _ in range(_ATTEMPTS):
        # pg_advisory_lock would hold a snapshot while it waits, which would block CREATE INDEX CONCURRENTLY.
        if await connection.fetchval(f"SELECT pg_try_advisory_lock({_LOCK})"):
            try:
                # The last one is a GRANT by another session that was committed while roles.sql waited for it.
                with suppress(
                    asyncpg.LockNotAvailableError,
                    asyncpg.DeadlockDetectedError,
                    asyncpg.InternalServerError,
                ):
                    await _apply(connection, versions)
                    return await read_version(connection)
            finally:
                if not connection.is_closed():
                    await connection.execute(f"RESET ALL; SELECT pg_advisory_unlock({_LOCK})")
        await asyncio.sleep(_PAUSE_SECONDS)
    raise SchemaOutdated(
        "A table stays locked, or another process is applying the schema: "
        "end the long transaction in pg_stat_activity, then run this again."
    )


async def read_version(connection: Connection) -> int:
    """Return the version of the database schema, or 0 without a schema that this release can use."""
    try:
        version: int | None = await connection.fetchval(
            "SELECT max(version) FROM schema_version HAVING bool_or(fingerprint = $1)", _FINGERPRINT
        )
    except (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError):
        return 0
    return version or 0


async def check(connection: Connection) -> str | None:
    """Raise SchemaOutdated if the schema is too old or missing, or the events must be adapted to this server.

    Raises PostgresUnavailable on a read-only server. Returns a warning if the clocks of this machine and of
    Postgres differ by more than a minute.
    """
    await check_settings(connection)
    try:
        version = await read_version(connection)
    except asyncpg.InsufficientPrivilegeError:
        raise SchemaOutdated(
            "Postgres gives this user no rights: its owner must run `schema apply`."
        ) from None
    if version < VERSION:
        raise SchemaOutdated
    if await connection.fetchval(_HAS_FUTURE_TRANSACTIONS):
        raise SchemaOutdated("Events were copied from another server: run `python -m service schema apply`.")
    if await connection.fetchval("SHOW transaction_read_only") == "on":
        raise PostgresUnavailable.counted()
    here, there = datetime.now(UTC), await connection.fetchval("SELECT clock_timestamp()")
    if abs(here - there) <= timedelta(minutes=1):
        return None
    return f"this machine's clock shows {here:%Y-%m-%dT%H:%M:%SZ}, and Postgres's {there:%Y-%m-%dT%H:%M:%SZ}"


# Whether events have transactions that this server has not reached: see `_apply`. Looks up one event a firm.
_HAS_FUTURE_TRANSACTIONS = """
    SELECT EXISTS (SELECT
                     FROM conveyancer
                    CROSS JOIN LATERAL (SELECT transaction
                                          FROM event
                                         WHERE event.conveyancer_id = conveyancer.id
                                         ORDER BY transaction DESC
                                         LIMIT 1) AS newest
                    WHERE newest.transaction >= pg_snapshot_xmax(pg_current_snapshot()))
"""


async def check_settings(connection: Connection) -> None:
    """Raise UnfitSetting if this session has a setting with which the service does not work."""
    settings = "SELECT name, setting FROM pg_settings WHERE name = ANY($1::text[])"
    for name, setting in await connection.fetch(settings, [*_SETTINGS]):
        if not re.fullmatch(_SETTINGS[name], setting):
            usual = _SETTINGS[name].partition("|")[0]
            how = "CREATE DATABASE" if name == "server_encoding" else "ALTER DATABASE or ALTER ROLE"
            raise UnfitSetting(f"Postgres has {name} = {setting}: choose {usual} by {how}.")


async def check_ready(pool: Pool, *, seconds: float) -> str | None:
    """Check that Postgres answers, accepts writes, and has a recent enough schema, as `check` does."""
    async with connections.acquired(pool, seconds=seconds) as connection:
        return await check(connection)


async def _apply(connection: Connection, versions: Sequence[str]) -> None:
    """Make one attempt of `apply`. Raises SchemaOutdated if the database has only other tables.

    A version is one transaction, unless it contains CONCURRENTLY, which Postgres rejects in a transaction.
    Then each statement is a transaction, and must be safe to repeat after an interruption. Because an
    interrupted CREATE INDEX CONCURRENTLY leaves an invalid index, DROP INDEX IF EXISTS must precede it.
    """
    stored = await read_version(connection)
    if stored == 0:
        if await connection.fetchval(
            "SELECT EXISTS (SELECT FROM pg_tables WHERE schemaname = current_schema)"
        ):
            raise SchemaOutdated(
                "The database has tables that this `schema apply` did not make: use an empty one. "
                "If an earlier `make run` made them, run `make clean`."
            )
        recorded = f"UPDATE schema_version SET fingerprint = '{_FINGERPRINT}'"  # noqa: S608 - a constant
        await connection.execute(f"{_SCHEMA.read_text()}\n{recorded}")
        stored = await read_version(connection)
    if stored > 1 + len(versions):
        return
    parts: list[str] = []
    for number, version in enumerate(versions[stored - 1 :], stored + 1):
        sql = f"{version.rstrip()}\nINSERT INTO schema_version (version) VALUES ({number});"
        parts += re.split(r"(?<=;)\n", sql) if "CONCURRENTLY" in sql else [sql]
    # One transaction with the newest version, so that no database has the version without its rights.
    newest = parts.pop() if parts else ""
    parts.append(f"{newest}\n{_ROLES.read_text()}")
    for part in parts:
        # Statements queue behind an ALTER TABLE that waits for its lock, and their callers time out after a
        # second. A concurrent index build waits for open transactions, and nothing queues behind it.
        lock_wait = "1h" if "CONCURRENTLY" in part else "200ms"
        await connection.execute(f"SET lock_timeout = '{lock_wait}'; SET statement_timeout = 0")
        await connection.execute(part)
    if await connection.fetchval(_HAS_FUTURE_TRANSACTIONS):
        # A logical copy brought the events from another server, whose transactions mean nothing here: later
        # events would come before these. With the lowest id, their sequence still orders those of a request.
        await connection.execute("UPDATE event SET transaction = '0'")
