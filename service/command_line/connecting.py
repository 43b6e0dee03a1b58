"""The connection to Postgres that a command uses."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import click

from service.postgres import outages, schema
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, connect
from service.postgres.schema import SchemaOutdated
from service.settings import DatabaseSettings, InvalidSetting, load

_CONNECT_SECONDS = 10.0
_STATEMENT_SECONDS = 60.0


@asynccontextmanager
async def postgres(
    *, checks_schema: bool = True, statement_seconds: float | None = _STATEMENT_SECONDS
) -> AsyncIterator[Connection]:
    """Open a direct connection to Postgres. A standby is enough for commands that only read.

    Raises InvalidSetting, PostgresUnavailable and SchemaOutdated, or ClickException if access or a lock is
    denied.
    """
    try:
        connection = await _connect(load(DatabaseSettings).database_url, statement_seconds)
        try:
            if checks_schema and await schema.read_version(connection) < schema.VERSION:
                raise SchemaOutdated
            yield connection
        finally:
            await connection.close(timeout=_CONNECT_SECONDS)
    except asyncpg.ReadOnlySQLTransactionError:
        raise PostgresUnavailable("Postgres at DATABASE_URL takes no writes: is it a standby?") from None
    except (
        asyncpg.InsufficientPrivilegeError,
        asyncpg.InvalidSchemaNameError,
        asyncpg.DuplicateTableError,
    ) as error:
        needed = "Has the user of DATABASE_URL the rights of calculation_requests_operator?"
        if not checks_schema:
            needed = "Is the user of DATABASE_URL the owner of the schema?"
        refusal = f"Postgres refused: {error}. {needed}"
        raise click.ClickException(refusal) from None
    except asyncpg.LockNotAvailableError:
        held = "Another transaction has locked the same rows. Find it in pg_stat_activity, then try again."
        raise click.ClickException(held) from None
    except outages.OUTAGE_ERRORS as error:
        reason = f"is unreachable ({type(error).__name__})."
        if isinstance(error, asyncpg.InvalidAuthorizationSpecificationError):
            reason = "rejects the login."
        raise PostgresUnavailable(f"Postgres at DATABASE_URL {reason}") from error


async def _connect(url: str, statement_seconds: float | None) -> Connection:
    try:
        return await connect(
            url,
            timeout=_CONNECT_SECONDS,
            command_timeout=statement_seconds,
            statement_cache_size=0,  # not every pooler supports prepared statements
            server_settings={"application_name": "calculation-requests operator"},
        )
    except ValueError as error:
        if outages.is_outage(error):  # A rejected certificate may be renewed.
            raise
        raise InvalidSetting("DATABASE_URL: not the address of a Postgres server") from None
