"""The database schema: lays schema.sql into an empty database, and recognizes it by its fingerprint.

There is no release yet, so no schema is carried forward: a changed schema.sql needs an empty database.
"""

import hashlib
import re
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

_LOCK = "23831, 1"  # keys of the advisory lock for applying the schema. Creates lock single numbers

# Comments and spaces may change. A process is not ready with a database made from another schema.sql.
FINGERPRINT = hashlib.sha256(re.sub(r"--.*|\s", "", _SCHEMA.read_text()).encode()).hexdigest()


class SchemaOutdated(Exception):
    """The database lacks the schema that this release needs: run `python -m service schema apply`."""


class UnfitSetting(SchemaOutdated):
    """A setting of the database, role or server with which the service does not work."""


async def apply(connection: Connection) -> None:
    """Lay the schema into an empty database, and grant rights to the roles that exist, in one transaction.

    A database that has the schema, and may be in use, only gets the rights. Raises SchemaOutdated if there
    are other tables.
    """
    await check_settings(connection)
    async with connection.transaction():
        await connection.execute("SET LOCAL lock_timeout = '10min'; SET LOCAL statement_timeout = 0")
        await connection.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
        if not await connection.fetchval(_HAS_TABLES):
            await connection.execute(_SCHEMA.read_text())
            await connection.execute("INSERT INTO schema_version (fingerprint) VALUES ($1)", FINGERPRINT)
        if not await is_current(connection):
            raise SchemaOutdated(
                "The database has tables that this `schema apply` did not make: use an empty one. "
                "If an earlier `make run` made them, run `make clean`."
            )
        await connection.execute(_ROLES.read_text())
        if await connection.fetchval(_HAS_FUTURE_TRANSACTIONS):
            # A logical copy brought the events from another server, whose transactions mean nothing here:
            # later events would come before these. With the lowest id, their sequence still orders those of
            # a request.
            await connection.execute("UPDATE event SET transaction = '0'")


_HAS_TABLES = "SELECT EXISTS (SELECT FROM pg_tables WHERE schemaname = current_schema)"


async def is_current(connection: Connection) -> bool:
    """Whether the database has the schema of this release."""
    try:
        found: bool = await connection.fetchval(
            "SELECT EXISTS (SELECT FROM schema_version WHERE fingerprint = $1)", FINGERPRINT
        )
    except (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError):
        return False
    return found


async def check(connection: Connection) -> str | None:
    """Raise SchemaOutdated if the schema is another or missing, or the events must be adapted to this server.

    Raises PostgresUnavailable on a read-only server. Returns a warning if the clocks of this machine and of
    Postgres differ by more than a minute.
    """
    await check_settings(connection)
    try:
        has_schema = await is_current(connection)
    except asyncpg.InsufficientPrivilegeError:
        raise SchemaOutdated(
            "Postgres gives this user no rights: its owner must run `schema apply`."
        ) from None
    if not has_schema:
        raise SchemaOutdated
    if await connection.fetchval(_HAS_FUTURE_TRANSACTIONS):
        raise SchemaOutdated("Events were copied from another server: run `python -m service schema apply`.")
    if await connection.fetchval("SHOW transaction_read_only") == "on":
        raise PostgresUnavailable.counted()
    here, there = datetime.now(UTC), await connection.fetchval("SELECT clock_timestamp()")
    if abs(here - there) <= timedelta(minutes=1):
        return None
    return f"this machine's clock shows {here:%Y-%m-%dT%H:%M:%SZ}, and Postgres's {there:%Y-%m-%dT%H:%M:%SZ}"


# Whether events have transactions that this server has not reached: see `apply`. Looks up one event a firm.
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
    """Check that Postgres answers, accepts writes, and has the schema, as `check` does."""
    async with connections.acquired(pool, seconds=seconds) as connection:
        return await check(connection)
