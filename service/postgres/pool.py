"""Connections to Postgres: one pool a process, bounded waits, and one name for every way it can be away."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import asyncpg

from service.postgres.outages import PostgresUnavailable, unavailable
from service.settings import Settings
from service.telemetry import metrics

Connection: TypeAlias = "asyncpg.Connection[Any]"
AWAY_SECONDS = 0.25  # to leave a Postgres alone that could not be reached
_SHARE_OF_CONNECTING = 0.8  # of the time for the database: so that the deadline of a caller comes later
_LONGEST_IDLE_SECONDS = 300.0  # of a connection: a network may forget one that nobody uses
_PROBES_WAITING = 10


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


async def close(connection: Connection, *, seconds: float) -> None:
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
