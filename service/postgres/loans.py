"""Connections and transactions on loan from the pool, each with a deadline."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType

import asyncpg

from service.postgres.outages import is_harmless, means_unavailable, unavailability, unavailable
from service.postgres.pool import Connection, Pool, close
from service.telemetry import metrics

SILENCE_SECONDS = 3.0  # in an open transaction; then Postgres gives up the client, and frees its locks
_BEGIN = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '3s'"  # in one round trip
_BEGIN_UNWAITING = f"{_BEGIN}; SET LOCAL synchronous_commit = off"


def connection(pool: Pool, *, seconds: float) -> AbstractAsyncContextManager[Connection]:
    """Lend a connection for at most *seconds*, the wait for it included; half of them may pass in the queue.

    As many again may pass until a statement that was interrupted has ended.

    Raises PostgresUnavailable when Postgres or the pool cannot answer in that time.
    """
    return _Loan(pool, seconds)


class _Loan(AbstractAsyncContextManager["Connection"]):
    """What `connection` returns: as a generator it would take twice the time."""

    def __init__(self, pool: Pool, seconds: float) -> None:
        self._pool = pool
        self._seconds = seconds
        self._deadline = asyncio.timeout(seconds)

    async def __aenter__(self) -> Connection:
        began = time.perf_counter()
        await self._deadline.__aenter__()
        try:
            self._lent = await self._pool.take(queue_seconds=self._seconds / 2)
        except BaseException as error:
            with unavailability():
                await self._deadline.__aexit__(type(error), error, error.__traceback__)
                raise
        if self._pool is not self._pool.reserve:
            metrics.pool_wait_seconds.observe(time.perf_counter() - began)
        return self._lent

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with unavailability():
                await self._deadline.__aexit__(kind, error, traceback)  # It must not pass while we close.
        finally:
            try:
                if isinstance(error, asyncpg.ReadOnlySQLTransactionError):
                    self._pool.doubt_all()
                if not is_harmless(error):
                    await close(self._lent, seconds=self._seconds)
            finally:
                self._pool.give_back(self._lent)
        if means_unavailable(error):
            raise unavailable() from error


@asynccontextmanager
async def transaction(
    pool: Pool, *, seconds: float, waits_for_disk: bool = True
) -> AsyncIterator[Connection]:
    """Lend a connection with an open transaction, on the terms of `connection`.

    One that does not wait for the disk may be forgotten, as a whole, when Postgres crashes just after it.

    A client that vanishes without a word, with its machine, would keep its locks for as long as TCP waits:
    two hours. So Postgres ends a transaction that is silent for SILENCE_SECONDS.
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
