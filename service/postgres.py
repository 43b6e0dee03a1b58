"""Connections to Postgres: one pool a process, bounded waits, and one name for every way it can be away."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any, TypeAlias

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from service import metrics
from service.settings import Settings

Connection: TypeAlias = "asyncpg.Connection[Any] | PoolConnectionProxy[Any]"

SCHEMA_VERSION = 2
SILENCE_SECONDS = 3.0  # in an open transaction; then Postgres gives up the client, and frees its locks
_BEGIN = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '3s'"  # in one round trip
_BEGIN_UNWAITING = f"{_BEGIN}; SET LOCAL synchronous_commit = off"
_SCHEMA_LOCK = 0x5D17_0001  # any number of our own: who applies the schema holds it

# What asyncpg raises when the server, its network or the time allowed is at fault, never the statement.
UNAVAILABLE = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ObjectNotInPrerequisiteStateError,  # a database that admits no connections for now
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.IdleInTransactionSessionTimeoutError,
)


class PostgresUnavailable(Exception):
    """Postgres did not answer in time."""


class SchemaOutdated(Exception):
    """The database has an older schema than this release needs: run `python -m service schema apply`."""


class Pool:
    """The connections of a process, with a queue before them that has an end.

    Without it, Postgres would spend its time on those who have waited so long that nobody wants the answer.
    """

    def __init__(self, connections: "asyncpg.Pool[Any]", *, size: int, queue_size: int) -> None:
        self._connections = connections
        self._free = asyncio.Semaphore(size)
        self._queue_size = queue_size
        self._waiting = 0

    def check_not_full(self) -> None:
        """Raise PostgresUnavailable when every connection is lent and no place is left in the queue."""
        if self._free.locked() and self._waiting >= self._queue_size:
            metrics.postgres_unavailable.inc()
            raise PostgresUnavailable

    @asynccontextmanager
    async def lend(self, *, seconds: float) -> AsyncIterator[Connection]:
        """Lend a connection, to a caller with a deadline. Half of *seconds* may pass in the queue.

        Raises PostgresUnavailable at once when the queue is full, and TimeoutError.
        """
        if self._free.locked():
            await self._wait_in_queue(seconds / 2)
        else:
            await self._free.acquire()  # at once
        try:
            lent = (
                await self._connections.acquire()
            )  # A timeout here, beside the deadline, would cost a task.
            try:
                yield lent
            finally:
                await self._connections.release(lent, timeout=seconds)
        finally:
            self._free.release()

    @asynccontextmanager
    async def lend_reserve(self, *, seconds: float) -> AsyncIterator[Connection]:
        """Lend the connection kept for the readiness probe: to be busy is no reason to be given no work."""
        async with self._connections.acquire(timeout=seconds) as lent:
            yield lent

    async def _wait_in_queue(self, seconds: float) -> None:
        self.check_not_full()
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                await self._free.acquire()
        finally:
            self._waiting -= 1


@asynccontextmanager
async def open_pool(settings: Settings) -> AsyncIterator[Pool]:
    """Open the pool of this process. It connects when first used, so a process starts without Postgres."""
    connections = asyncpg.create_pool(
        settings.database_url,
        min_size=0,
        max_size=settings.database_connections,
        timeout=settings.database_timeout_seconds,
        statement_cache_size=settings.database_statement_cache_size,
        reset=_keep_session,
        server_settings={"application_name": "calculation-requests"},
    )
    metrics.watch_pool(connections, size=settings.database_connections)
    async with connections:
        yield Pool(connections, size=settings.database_pool_size, queue_size=settings.database_queue_size)


async def _keep_session(_: object) -> None:
    """Skip asyncpg's clean-up query at each release: nothing here outlives its transaction."""


@asynccontextmanager
async def unavailability() -> AsyncIterator[None]:
    """Raise PostgresUnavailable in place of whatever asyncpg says when the server is away."""
    try:
        yield
    except UNAVAILABLE as error:
        if isinstance(error, ValueError):
            raise  # asyncpg's own: an argument that cannot be sent, or a bad DSN. Waiting mends neither.
        metrics.postgres_unavailable.inc()
        raise PostgresUnavailable from error


@asynccontextmanager
async def connection(pool: Pool, *, seconds: float) -> AsyncIterator[Connection]:
    """Lend a connection for at most *seconds*, the wait for it included.

    Raises PostgresUnavailable when Postgres or the pool cannot answer in that time.
    """
    began = perf_counter()
    async with unavailability(), asyncio.timeout(seconds), pool.lend(seconds=seconds) as lent:
        metrics.pool_wait_seconds.observe(perf_counter() - began)
        yield lent


@asynccontextmanager
async def transaction(
    pool: Pool, *, seconds: float, waits_for_disk: bool = True
) -> AsyncIterator[Connection]:
    """Lend a connection with an open transaction, on the terms of `connection`.

    One that does not wait for the disk may be forgotten, as a whole, when Postgres crashes just after it.

    A client that vanishes without a word, with its machine, would keep its locks for as long as TCP waits:
    two hours. So Postgres ends a transaction in which it hears nothing for SILENCE_SECONDS.
    """
    async with connection(pool, seconds=seconds) as lent:
        try:
            await lent.execute(_BEGIN if waits_for_disk else _BEGIN_UNWAITING)
            yield lent
            await lent.execute("COMMIT")
        except asyncio.CancelledError:
            lent.terminate()  # The time is over, and a ROLLBACK may not be answered: Postgres needs none.
            raise
        except BaseException:
            await _roll_back(lent)
            raise


async def _roll_back(lent: Connection) -> None:
    try:
        await lent.execute("ROLLBACK")
    except BaseException:
        lent.terminate()
        raise


async def apply_schema(connection: Connection, statements: str) -> None:
    """Run the statements of schema.sql, one process at a time."""
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _SCHEMA_LOCK)
        await connection.execute(statements)


async def check_schema(connection: Connection) -> None:
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
    if row is None or (row["version"] or 0) < SCHEMA_VERSION:
        raise SchemaOutdated
    if row["is_read_only"]:
        raise PostgresUnavailable


def schema_check(pool: Pool, *, seconds: float) -> Callable[[], Awaitable[None]]:
    """Return a readiness check: Postgres answers and its schema is recent enough."""

    async def check() -> None:
        async with (
            unavailability(),
            asyncio.timeout(seconds),
            pool.lend_reserve(seconds=seconds) as lent,
        ):
            await check_schema(lent)

    return check
