"""The connection to Postgres that a command uses, and why a server is unavailable."""

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import click

from service.postgres import connections, outages, schema
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, connect
from service.postgres.schema import SchemaOutdated
from service.settings import DatabaseSettings, InvalidSetting, load

LOCK_SECONDS = 5.0  # the longest that a transaction waits for a lock, because others may queue behind it

# The exceptions whose messages are written for operators, and words for others. {1} is their last argument.
EXPLAINED = (click.ClickException, InvalidSetting, PostgresUnavailable, SchemaOutdated)
WORDS: dict[type[BaseException] | tuple[type[BaseException], ...], str] = {
    ssl.SSLCertVerificationError: "its certificate is not accepted: {0.verify_message}",
    ssl.SSLError: "TLS fails ({0.reason}): is this its port for TLS?",
    asyncpg.InvalidAuthorizationSpecificationError: "it rejects the login",
    asyncpg.InvalidCatalogNameError: "it has no such database",
    (asyncpg.PostgresConnectionError, asyncpg.InterfaceError): "the connection was lost",
    # Its own words, such as that it is shutting down. Without their details they are one line.
    asyncpg.PostgresError: "{0.message}",
    ConnectionRefusedError: "connection refused",
    (EOFError, ConnectionResetError): "it closed the connection: is this its port, and is it one for TLS?",
    socket.gaierror: "unknown host",
    TimeoutError: "no answer in time",
}


@asynccontextmanager
async def postgres(url: str | None = None, *, applies_schema: bool = False) -> AsyncIterator[Connection]:
    """Open a direct connection to Postgres, at DATABASE_URL unless there is a *url*.

    A standby is enough for commands that only read. Raises InvalidSetting, PostgresUnavailable and
    SchemaOutdated, or ClickException if access or a lock is denied.
    """
    try:
        connection = await connect(
            url or load(DatabaseSettings).database_url,
            timeout=10.0,  # to connect: longer than in the API, because no HTTP caller waits
            command_timeout=None if applies_schema else 60.0,  # Some statements read whole tables.
            statement_cache_size=0,  # not every pooler supports prepared statements
            server_settings={"application_name": "calculation-requests operator"},
        )
        try:
            if not applies_schema and await schema.read_version(connection) < schema.VERSION:
                raise SchemaOutdated
            yield connection
        finally:
            await connection.close(timeout=2.0)  # asyncpg cancels a running statement first
    except (asyncpg.ClientConfigurationError, UnicodeError):
        raise InvalidSetting("DATABASE_URL: not the address of a Postgres server") from None
    except asyncpg.ReadOnlySQLTransactionError:
        raise PostgresUnavailable("Postgres at DATABASE_URL takes no writes: is it a standby?") from None
    except (
        asyncpg.InsufficientPrivilegeError,
        asyncpg.InvalidSchemaNameError,
        asyncpg.DuplicateTableError,
    ) as error:
        role = "the schema's owner" if applies_schema else "calculation_requests_operator"
        refusal = f"Postgres refused: {error}. Has the user of DATABASE_URL the rights of {role}?"
        raise click.ClickException(refusal) from None
    except asyncpg.LockNotAvailableError:
        held = "Another transaction has locked the same rows. Find it in pg_stat_activity, then try again."
        raise click.ClickException(held) from None
    except outages.OUTAGE_ERRORS as error:
        raise PostgresUnavailable(f"Postgres at DATABASE_URL is unavailable: {reason(error)}") from error


@asynccontextmanager
async def bounded_transaction(connection: Connection) -> AsyncIterator[None]:
    """Open a transaction on a command's connection. Its commit waits for a standby: see REPLICATE.

    A lock that is not acquired in LOCK_SECONDS raises asyncpg.LockNotAvailableError.
    """
    async with connection.transaction(isolation="read_committed"):
        await connection.execute(connections.allow_silence(connections.SILENCE_SECONDS))
        await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS:g}s'")
        yield
        await connection.execute(f"SELECT {connections.REPLICATE}")


def reason(error: BaseException) -> str:
    """Return why a server is unavailable. Messages of libraries are left out: they may contain passwords."""
    if isinstance(error, EXPLAINED):
        return str(error) or error.__doc__ or ""
    cause: BaseException | None = error
    seen: list[BaseException] = []
    while cause is not None and cause not in seen:  # aiormq and asyncio may make a circle of causes.
        seen.append(cause)
        for kind, words in WORDS.items():
            if isinstance(cause, kind):
                return words.format(cause, *cause.args[-1:])
        if isinstance(cause, Exception):  # A CancelledError explains nothing.
            error = cause
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__
