"""Connections and transactions connection from the pool, each with a deadline."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType

from service.postgres.outages import PostgresUnavailable, is_harmless, is_outage
from service.postgres.pool import Connection, Pool
from service.settings import QUEUE_SHARE
from service.telemetry import metrics

# SQL: makes the commit wait for a synchronous standby even if the transaction writes nothing else. When such
# a wait is cancelled, Postgres keeps the commit, but a failover may lose it. So a repeat that finds its work
# done must wait, too, before it is answered or acknowledged.
REPLICATE = "pg_logical_emit_message(true, 'replicate', '')"

SILENCE_SECONDS = 3.0  # in an open transaction; then Postgres drops the client and frees its locks
LOCK_SECONDS = 5.0  # for which an operator's command waits: others may wait for the locks that it holds


class Acquired(AbstractAsyncContextManager["Connection"]):
    """Lends a connection for at most *seconds*, including the wait for it, which may take half of them.

    An interrupted statement is then ended in the background, by force after as long again.

    Raises PostgresUnavailable when Postgres or the pool does not answer in that time. A class, because a
    generator would take twice the time.
    """

    def __init__(self, pool: Pool, *, seconds: float) -> None:
        self._pool = pool
        self._seconds = seconds
        self._deadline = asyncio.timeout(seconds)

    async def __aenter__(self) -> Connection:
        began = time.perf_counter()
        await self._deadline.__aenter__()
        try:
            self._acquired = await self._pool.acquire(queue_seconds=self._seconds * QUEUE_SHARE)
        except BaseException as error:
            await self._end_deadline(error)
            raise
        metrics.pool_wait_seconds.observe(time.perf_counter() - began)
        return self._acquired

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._end_deadline(error)
        finally:
            if error is None or is_harmless(error):
                self._pool.release(self._acquired)
            else:
                self._pool.retire(self._acquired, seconds=self._seconds)

    async def _end_deadline(self, error: BaseException | None) -> None:
        """Cancel the deadline. Raises PostgresUnavailable if it has expired, or if *error* is an outage."""
        try:
            await self._deadline.__aexit__(type(error) if error else None, error, None)
        except TimeoutError as expired:
            raise PostgresUnavailable.counted() from expired
        if error is not None and is_outage(error):
            raise PostgresUnavailable.counted() from error


def allow_silence(seconds: float) -> str:
    """Return the SQL after which Postgres ends this transaction once its client is silent for *seconds*."""
    return f"SET LOCAL idle_in_transaction_session_timeout = '{seconds * 1000:.0f}ms'"


@asynccontextmanager
async def transaction(
    pool: Pool, *, seconds: float, waits_for_disk: bool = True
) -> AsyncIterator[Connection]:
    """Lend a connection with an open transaction, on the terms of a Acquired.

    Without *waits_for_disk*, a crash of Postgres shortly after the commit may undo the whole transaction.

    If a client's machine disappears from the network, TCP would keep its locks for two hours. So Postgres
    ends a transaction that has been silent for SILENCE_SECONDS.
    """
    begin = f"BEGIN; {allow_silence(SILENCE_SECONDS)}"
    if not waits_for_disk:
        begin += "; SET LOCAL synchronous_commit = off"
    async with Acquired(pool, seconds=seconds) as connection:
        try:
            await connection.execute(begin)  # in one round trip
            yield connection
            await connection.execute("COMMIT")
        except asyncio.CancelledError:
            connection.terminate()  # No time is left to wait for a ROLLBACK, and Postgres needs none.
            raise
        except BaseException:
            try:
                await connection.execute("ROLLBACK")
            except BaseException:
                connection.terminate()
                raise
            raise


@asynccontextmanager
async def bounded_transaction(own: Connection) -> AsyncIterator[None]:
    """Open a transaction over a connection of the caller's own, which is not from a pool.

    Postgres ends it, too, after SILENCE_SECONDS of silence. Its commit waits for a standby: see REPLICATE.
    It waits LOCK_SECONDS for each lock, then raises asyncpg.LockNotAvailableError.
    """
    async with own.transaction():
        await own.execute(allow_silence(SILENCE_SECONDS))
        await own.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS:g}s'")
        yield
        await own.execute(f"SELECT {REPLICATE}")
