"""The pool of Postgres connections: one per process, opened when first needed, with a bounded queue."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import asyncpg

from service.postgres.outages import PostgresUnavailable
from service.settings import Settings
from service.telemetry import metrics

Connection: TypeAlias = "asyncpg.Connection[Any]"
_CONNECT_SHARE = 0.8  # of the time for the database, so that connecting fails before the caller's deadline
_RESERVE_QUEUE_SIZE = 10


class Pool:
    """A lazily filled connection pool with a bounded wait queue.

    With an unbounded queue, an overloaded Postgres would work for callers that have already given up.
    asyncpg's own pool has no bound, and lends through a task, which takes as long as a statement. Sessions
    are not reset between callers: nothing outlives its transaction. Where Postgres accepts fewer connections
    than the pool may open, callers wait for one that is lent.

    After a failed attempt to connect there is none for *reconnect_pause_seconds*: refusing must be cheap.
    Networks drop idle connections silently, so those idle for *longest_idle_seconds* are closed.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        *,
        size: int,
        queue_size: int,
        reserve: "Pool | None" = None,
        reconnect_pause_seconds: float = 0.25,
        longest_idle_seconds: float = 300.0,
    ) -> None:
        self.reserve = reserve or self  # for the readiness probe: a busy process stays ready
        self._connect = connect
        self._free = asyncio.Semaphore(size)
        self._queue_size = queue_size
        self._reconnect_pause_seconds = reconnect_pause_seconds
        self._longest_idle_seconds = longest_idle_seconds
        self._waiting = 0
        self._opening = 0
        self._opened: set[Connection] = set()
        self._idle: deque[tuple[Connection, float]] = deque()  # with the time since when; last in, first out
        self._doubted: set[Connection] = set()  # closed when returned
        self._returned = asyncio.Event()  # pulsed: set and cleared at once
        self._reconnect_after = -math.inf
        self._is_closed = False

    @property
    def open_size(self) -> int:
        """The number of open connections."""
        return sum(not each.is_closed() for each in self._opened)

    @property
    def idle_size(self) -> int:
        """The number of open connections that are not lent."""
        return sum(not each.is_closed() for each, _ in self._idle)

    def check_not_full(self) -> None:
        """Raise PostgresUnavailable when every connection is lent and the queue is full."""
        if self._free.locked() and self._waiting >= self._queue_size:
            raise PostgresUnavailable.counted()

    def take_place(self) -> None:
        """Take a place in the queue. Raises PostgresUnavailable when it is full."""
        self.check_not_full()
        self._waiting += 1

    def leave_places(self, count: int) -> None:
        """Free *count* places in the queue."""
        self._waiting -= count

    def check_reachable(self) -> None:
        """Raise PostgresUnavailable when no connection is open and an attempt to open one has just failed."""
        if not self._opened and self._pauses_reconnecting:
            raise PostgresUnavailable.counted()

    async def take(self, *, queue_seconds: float) -> Connection:
        """Lend a connection. The caller has a deadline of its own, and must give the connection back.

        Raises PostgresUnavailable at once when the queue is full or an attempt to connect has just failed;
        TimeoutError when the wait took longer than *queue_seconds*, since too little time is left then; and
        what asyncpg raises while connecting.
        """
        if self._free.locked():
            await self._wait_in_queue(queue_seconds)
        else:
            await self._free.acquire()  # does not wait
        try:
            return self._take_idle() or await self._open_or_wait(queue_seconds)
        except BaseException:
            self._leave()
            raise

    def give_back(self, connection: Connection) -> None:
        """Keep the connection for the next caller if it is usable; close it otherwise."""
        if connection.is_closed() or connection.is_in_transaction() or connection in self._doubted:
            self._forget(connection)
        else:
            self._idle.append((connection, time.monotonic()))
        self._leave()

    def doubt_all(self) -> None:
        """Lend none of the current connections again: after a failover their server may be read-only."""
        while self._idle:
            self._forget(self._idle.pop()[0])
        self._doubted.update(self._opened)

    async def close(self, *, seconds: float) -> None:
        """Close every connection, cancel running statements, and open no more connections."""
        self._is_closed = True
        await asyncio.gather(*(close(each, seconds=seconds) for each in self._opened))

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
        long_ago = time.monotonic() - self._longest_idle_seconds
        while self._idle and self._idle[0][1] < long_ago:
            self._forget(self._idle.popleft()[0])
        while self._idle:
            connection, _ = self._idle.pop()
            if not connection.is_closed():
                return connection
            self._forget(connection)
        return None

    async def _open_or_wait(self, seconds: float) -> Connection:
        """Open a connection. If Postgres accepts no more, wait for one that is in use."""
        until = time.monotonic() + seconds
        while True:
            if not self._pauses_reconnecting:
                try:
                    return await self._open()
                except Exception:
                    if not self._idle and not self._is_any_in_use:
                        raise
            if connection := await self._wait_for_return(until):
                return connection
            if self._pauses_reconnecting:
                raise PostgresUnavailable.counted()

    async def _wait_for_return(self, until: float) -> "Connection | None":
        """Return the next connection given back, or None once none is in use."""
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
            self._reconnect_after = time.monotonic() + self._reconnect_pause_seconds
            raise
        finally:
            self._opening -= 1
        self._reconnect_after = -math.inf
        self._opened.add(connection)
        if self._is_closed:
            self._forget(connection)
            raise PostgresUnavailable
        return connection

    def _forget(self, connection: Connection) -> None:
        self._opened.remove(connection)
        self._doubted.discard(connection)
        connection.terminate()  # even if the server has closed it: asyncpg may not have noticed yet

    def _leave(self) -> None:
        """Pass the turn on, first to callers waiting for a returned connection, then to the queue."""
        self._returned.set()
        self._returned.clear()
        self._free.release()

    @property
    def _is_any_in_use(self) -> bool:
        """Whether a connection is lent or being opened."""
        return self._opening > 0 or len(self._opened) > len(self._idle)

    @property
    def _pauses_reconnecting(self) -> bool:
        return time.monotonic() < self._reconnect_after


async def close(connection: Connection, *, seconds: float) -> None:
    """Cancel the running statement and close the connection, by force after *seconds*."""
    with suppress(Exception):
        async with asyncio.timeout(seconds):
            await connection.close()


@asynccontextmanager
async def open_pool(settings: Settings) -> AsyncIterator[Pool]:
    """Open the pool of this process. It connects on first use, so a process starts without Postgres."""

    async def connect() -> Connection:
        return await asyncpg.connect(
            settings.database_url,
            timeout=settings.database_timeout_seconds * _CONNECT_SHARE,
            statement_cache_size=settings.database_statement_cache_size,
            server_settings={"application_name": "calculation-requests"},
        )

    reserve = Pool(connect, size=1, queue_size=_RESERVE_QUEUE_SIZE)
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
