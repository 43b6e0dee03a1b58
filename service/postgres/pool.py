"""Connections to Postgres: one pool a process, bounded waits, and one name for every way it can be away."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from types import TracebackType
from typing import Any, TypeAlias

import asyncpg

from service.settings import Settings
from service.telemetry import metrics

Connection: TypeAlias = "asyncpg.Connection[Any]"

SILENCE_SECONDS = 3.0  # in an open transaction; then Postgres gives up the client, and frees its locks
_BEGIN = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '3s'"  # in one round trip
_BEGIN_UNWAITING = f"{_BEGIN}; SET LOCAL synchronous_commit = off"
AWAY_SECONDS = 0.25  # to leave a Postgres alone that could not be reached
_SHARE_OF_CONNECTING = 0.8  # of the time for the database: so that the deadline of a caller comes later
_LONGEST_IDLE_SECONDS = 300.0  # of a connection: a network may forget one that nobody uses
_PROBES_WAITING = 10

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

# With these Postgres refuses a statement, and nothing else of the session has changed.
_REFUSALS = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.LockNotAvailableError,
    asyncpg.SyntaxOrAccessError,
    asyncpg.TransactionRollbackError,
)


class PostgresUnavailable(Exception):
    """Postgres did not answer in time."""


def unavailable() -> PostgresUnavailable:
    """Return the exception, counted."""
    metrics.postgres_unavailable.inc()
    return PostgresUnavailable()


class Pool:
    """Connections that are opened when first needed and kept for the next caller, behind a queue with an end.

    Without that end, Postgres would spend its time on those who have waited so long that nobody wants the
    answer. asyncpg's own pool has none; and it lends by way of a task, which takes as long as a statement.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        *,
        size: int,
        queue_size: int,
        reserve: "Pool | None" = None,
    ) -> None:
        self.reserve = reserve or self  # for the readiness probe: to be busy is no reason to be given no work
        self._connect = connect
        self._free = asyncio.Semaphore(size)
        self._queue_size = queue_size
        self._waiting = 0
        self._opening = 0
        self._opened: set[Connection] = set()
        self._idle: deque[tuple[Connection, float]] = deque()  # and since when; the last is lent first
        self._doubted: set[Connection] = set()  # not to be lent again
        self._returned = asyncio.Event()  # set for a moment
        self._away_until = -math.inf
        self._is_closed = False

    @property
    def open_size(self) -> int:
        """How many connections there are."""
        return sum(not each.is_closed() for each in self._opened)

    @property
    def idle_size(self) -> int:
        """How many of them are not lent."""
        return sum(not each.is_closed() for each, _ in self._idle)

    def check_not_full(self) -> None:
        """Raise PostgresUnavailable when every connection is lent and no place is left in the queue."""
        if self._free.locked() and self._waiting >= self._queue_size:
            raise unavailable()

    def take_place(self) -> None:
        """Count one more in the queue. Raises PostgresUnavailable when no place is left."""
        self.check_not_full()
        self._waiting += 1

    def leave_places(self, count: int) -> None:
        """Count fewer in the queue."""
        self._waiting -= count

    def check_not_away(self) -> None:
        """Raise PostgresUnavailable when there is no connection, and Postgres refused one a moment ago."""
        if not self._opened and self._is_away:
            raise unavailable()

    async def take(self, *, queue_seconds: float) -> Connection:
        """Lend a connection to a caller that has a deadline and gives it back.

        Raises PostgresUnavailable at once, when the queue is full or a connection was refused a moment ago;
        TimeoutError when it is the caller's turn only after *queue_seconds*, by which time too little is left
        to it; and whatever asyncpg raises when it connects.
        """
        if self._free.locked():
            await self._wait_in_queue(queue_seconds)
        else:
            await self._free.acquire()  # at once
        try:
            return self._take_idle() or await self._open_or_wait(queue_seconds)
        except BaseException:
            self._leave()
            raise

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next caller, if it can be used again."""
        if connection.is_closed() or connection.is_in_transaction() or connection in self._doubted:
            self._forget(connection)
        else:
            self._idle.append((connection, time.monotonic()))
        self._leave()

    def doubt_all(self) -> None:
        """Lend none of the present connections again: their server may be the wrong one by now."""
        while self._idle:
            self._forget(self._idle.pop()[0])
        self._doubted.update(self._opened)

    async def close(self, *, seconds: float) -> None:
        """Close every connection, end what is under way, and open none any more."""
        self._is_closed = True
        await asyncio.gather(*(_close(each, seconds=seconds) for each in self._opened))

    async def _wait_in_queue(self, seconds: float) -> None:
        self.take_place()
        began = time.monotonic()
        try:
            await self._free.acquire()
        finally:
            self.leave_places(1)
        if time.monotonic() - began > seconds:
            self._free.release()
            raise TimeoutError

    def _take_idle(self) -> "Connection | None":
        long_ago = time.monotonic() - _LONGEST_IDLE_SECONDS
        while self._idle and self._idle[0][1] < long_ago:
            self._forget(self._idle.popleft()[0])
        while self._idle:
            connection, _ = self._idle.pop()
            if not connection.is_closed():
                return connection
            self._forget(connection)
        return None

    async def _open_or_wait(self, seconds: float) -> Connection:
        """Open a connection; or, while Postgres grants no more than are in use, wait for one of those."""
        until = time.monotonic() + seconds
        while True:
            if not self._is_away:
                try:
                    return await self._open()
                except Exception:
                    if not self._idle and not self._is_any_in_use:
                        raise
            if connection := await self._wait_for_return(until):
                return connection
            if self._is_away:
                raise unavailable()

    async def _wait_for_return(self, until: float) -> "Connection | None":
        """Return a connection that was given back, or None once none is in use."""
        while (connection := self._take_idle()) is None and self._is_any_in_use:
            await self._returned.wait()
            if time.monotonic() > until:
                raise TimeoutError
        return connection

    async def _open(self) -> Connection:
        self._opening += 1
        try:
            connection = await self._connect()
        except Exception:
            self._away_until = time.monotonic() + AWAY_SECONDS
            raise
        finally:
            self._opening -= 1
        self._away_until = -math.inf
        self._opened.add(connection)
        if self._is_closed:
            self._forget(connection)
            raise PostgresUnavailable
        return connection

    def _forget(self, connection: Connection) -> None:
        self._opened.remove(connection)
        self._doubted.discard(connection)
        connection.terminate()  # also one that the other side has closed: asyncpg may not know all of it yet

    def _leave(self) -> None:
        """Let another have its turn: one that waits for a connection before those in the queue."""
        self._returned.set()
        self._returned.clear()
        self._free.release()

    @property
    def _is_any_in_use(self) -> bool:
        """Whether somebody has a connection, or may have one in a moment."""
        return self._opening > 0 or len(self._opened) > len(self._idle)

    @property
    def _is_away(self) -> bool:
        return time.monotonic() < self._away_until


async def _close(connection: Connection, *, seconds: float) -> None:
    """Have Postgres end what it does on this connection, and close it."""
    with suppress(Exception):  # After those seconds it is cut off.
        async with asyncio.timeout(seconds):
            await connection.close()


@asynccontextmanager
async def open_pool(settings: Settings) -> AsyncIterator[Pool]:
    """Open the pool of this process. It connects when first used, so a process starts without Postgres."""

    async def connect() -> Connection:
        return await asyncpg.connect(
            settings.database_url,
            timeout=settings.database_timeout_seconds * _SHARE_OF_CONNECTING,
            statement_cache_size=settings.database_statement_cache_size,
            server_settings={"application_name": "calculation-requests"},
        )

    reserve = Pool(connect, size=1, queue_size=_PROBES_WAITING)
    pool = Pool(
        connect,
        size=settings.database_pool_size,
        queue_size=settings.database_queue_size,
        reserve=reserve,
    )
    metrics.watch_pool(
        max_size=settings.database_connections,
        open_size=lambda: pool.open_size + reserve.open_size,
        idle_size=lambda: pool.idle_size + reserve.idle_size,
    )
    try:
        yield pool
    finally:
        seconds = settings.database_timeout_seconds
        await asyncio.gather(pool.close(seconds=seconds), reserve.close(seconds=seconds))


def means_unavailable(error: BaseException | None) -> bool:
    """Whether waiting may mend it. It does not mend a bad argument or DSN: asyncpg's ValueErrors."""
    return isinstance(error, UNAVAILABLE) and not isinstance(error, ValueError)


def is_harmless(error: BaseException | None) -> bool:
    """Whether a session is known to be as it was before this error, and so may be lent again.

    After any other, a statement may be under way, a transaction open, or the server one that takes no writes.
    """
    if isinstance(error, asyncpg.PostgresError):
        # asyncpg's own DataError has no severity: where it keeps no statements, it has begun a transaction.
        return isinstance(error, _REFUSALS) and error.severity is not None
    return error is None or (
        isinstance(error, Exception) and not isinstance(error, (PostgresUnavailable, *UNAVAILABLE))
    )


@contextmanager
def unavailability() -> Iterator[None]:
    """Raise PostgresUnavailable in place of whatever asyncpg says when the server is away."""
    try:
        yield
    except UNAVAILABLE as error:
        if not means_unavailable(error):
            raise
        raise unavailable() from error


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
                    await _close(self._lent, seconds=self._seconds)
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
