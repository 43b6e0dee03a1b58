"""The pool of Postgres connections: one per process, filled on demand, with a bounded queue."""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeAlias

import asyncpg

from service.postgres.outages import PostgresUnavailable
from service.settings import CONNECT_SHARE, Settings
from service.telemetry import metrics

Connection: TypeAlias = "asyncpg.Connection[Any]"

_QUEUE_PER_CONNECTION = 32  # callers that may wait per connection: as many as one group commit serves
_LARGEST_SHARE = 0.5  # of the queue, for one firm
_RECONNECT_PAUSE_SECONDS = 0.25  # after a failed attempt to connect, so that rejecting callers is cheap
_LONGEST_IDLE_SECONDS = 300.0  # Networks drop idle connections silently.

# The firm that the current task serves, "" if it serves none, or None in the worker, which has no limit.
firm_served: ContextVar[str | None] = ContextVar("firm_served", default=None)


class Pool:
    """A lazily filled connection pool with a bounded queue, in which callers wait for their turn.

    With an unbounded queue, as in asyncpg's own pool, Postgres would work for callers that have already given
    up. asyncpg's pool also releases connections in a task, which made a statement take 44 % longer. Sessions
    are not reset between callers, because all settings that a caller makes end with its transaction.

    If Postgres accepts fewer connections than the pool may open, callers wait for a connection in use.
    """

    def __init__(self, connect: Callable[[], Awaitable[Connection]], *, size: int) -> None:
        self._connect = connect
        self._size = size
        self._queue_size = _QUEUE_PER_CONNECTION * size
        self._waiting = 0
        self._waiting_of: Counter[str | None] = Counter()  # by firm
        self._turns: deque[asyncio.Future[Connection | None]] = deque()  # of the callers in the queue
        self._opening = 0
        self._opened: set[Connection] = set()
        self.opened_count = 0  # connections opened so far
        self._retiring: dict[Connection, asyncio.Task[None]] = {}
        self._idle: deque[tuple[Connection, float]] = deque()  # with the time of release; last in, first out
        self._reconnect_after = -math.inf
        self._connect_error: Exception | None = None  # of the latest attempt

    @property
    def open_size(self) -> int:
        """The number of open connections."""
        return sum(not each.is_closed() for each in self._opened)

    @property
    def idle_size(self) -> int:
        """The number of open connections that are not in use."""
        return sum(not each.is_closed() for each, _ in self._idle)

    @property
    def is_login_rejected(self) -> bool:
        """Whether Postgres rejected the login at the latest attempt to connect."""
        return isinstance(self._connect_error, asyncpg.InvalidAuthorizationSpecificationError)

    def check_available(self) -> None:
        """Raise PostgresUnavailable if the queue is full, or no connection is open and connecting failed."""
        if self._waiting >= self._queue_size or (not self._opened and self._pauses_reconnecting):
            raise PostgresUnavailable.counted()

    @contextmanager
    def place_in_queue(self) -> Iterator[None]:
        """Take a place in the queue for the block.

        Raises PostgresUnavailable if the queue is full, or if the callers of this firm have half of it. The
        other half is for the callers of other firms.
        """
        firm = firm_served.get()
        share = self._queue_size if firm is None else self._queue_size * _LARGEST_SHARE
        if self._waiting >= self._queue_size or self._waiting_of[firm] >= share:
            raise PostgresUnavailable.counted()
        self._waiting += 1
        self._waiting_of[firm] += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._waiting_of[firm] -= 1
            if not self._waiting_of[firm]:
                del self._waiting_of[firm]

    async def acquire(self, *, queue_seconds: float) -> Connection:
        """Return a connection. The caller sets its own deadline, and must release or retire the connection.

        Raises PostgresUnavailable at once if there is no place in the queue, or if no connection is in use
        and connecting has just failed. Raises TimeoutError if the wait took longer than *queue_seconds*,
        because too little time is left then. Raises what asyncpg raises while connecting.
        """
        until = time.monotonic() + queue_seconds
        while (connection := self._take_idle()) is None:
            if self._pauses_reconnecting and not self._in_use:
                raise PostgresUnavailable.counted() from self._connect_error
            if self._pauses_reconnecting or self._in_use >= self._size:
                connection = await self._wait_for_turn(until)
            else:
                connection = await self._open()
            if connection is not None:
                break
        return connection

    def release(self, connection: Connection) -> None:
        """Pass the connection on to the next caller if it is usable; close it otherwise."""
        if connection.is_closed() or connection.is_in_transaction():
            self._forget(connection)
            self._call_all()
            return
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():  # otherwise its caller has given up
                turn.set_result(connection)
                return
        self._idle.append((connection, time.monotonic()))

    def retire(self, connection: Connection, *, seconds: float) -> None:
        """Close a connection in the background. It counts as in use, because its statement may still run."""
        self._retiring[connection] = asyncio.create_task(self._retire(connection, seconds))

    async def _retire(self, connection: Connection, seconds: float) -> None:
        await _close(connection, seconds=seconds)
        del self._retiring[connection]
        self.release(connection)

    async def close(self, *, seconds: float) -> None:
        """Close every connection, and cancel running statements."""
        # Closing a connection twice at the same time would hang.
        closing = [_close(each, seconds=seconds) for each in self._opened - self._retiring.keys()]
        await asyncio.gather(*closing, *self._retiring.values())

    async def _wait_for_turn(self, until: float) -> "Connection | None":
        """Return the next connection that is released, or None if a new connection may be opened."""
        turn: asyncio.Future[Connection | None] = asyncio.get_running_loop().create_future()
        with self.place_in_queue():
            self._turns.append(turn)
            try:
                connection = await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and (unused := turn.result()):
                    self.release(unused)
                raise
        if connection is not None and time.monotonic() > until:
            self.release(connection)
            raise TimeoutError
        return connection

    def _call_all(self) -> None:
        """Let all callers in the queue check whether they may open a connection."""
        turns = [*self._turns]
        self._turns.clear()
        for turn in turns:
            if not turn.done():
                turn.set_result(None)

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

    async def _open(self) -> "Connection | None":
        """Open a connection. Returns None if this fails while other connections are open or being opened."""
        self._opening += 1
        try:
            connection = await self._connect()
            self._opened.add(connection)
            self.opened_count += 1
        except Exception as error:
            self._connect_error = error
            self._reconnect_after = time.monotonic() + _RECONNECT_PAUSE_SECONDS
            if self._in_use == 1 and not self._idle:  # No other connection is open or being opened.
                raise
            return None
        finally:
            self._opening -= 1
            self._call_all()
        self._reconnect_after = -math.inf
        self._connect_error = None
        return connection

    def _forget(self, connection: Connection) -> None:
        self._opened.remove(connection)
        connection.terminate()  # even if the server has closed it, because asyncpg may not have noticed yet

    @property
    def _in_use(self) -> int:
        """The number of connections that are in use or being opened."""
        return len(self._opened) - len(self._idle) + self._opening

    @property
    def _pauses_reconnecting(self) -> bool:
        return time.monotonic() < self._reconnect_after


async def _close(connection: Connection, *, seconds: float) -> None:
    """Cancel the running statement and close the connection, by force after *seconds*."""
    with suppress(Exception):
        async with asyncio.timeout(seconds):
            await connection.close()


async def connect(url: str, **options: Any) -> Connection:  # noqa: ANN401 - asyncpg's
    """Connect to Postgres with asyncpg's *options*. A user without the right CONNECT is a rejected login."""
    try:
        connection: Connection = await asyncpg.connect(url, **options)
    except asyncpg.InsufficientPrivilegeError as error:
        raise asyncpg.InvalidAuthorizationSpecificationError(str(error)) from error
    return connection


@asynccontextmanager
async def open_pool(settings: Settings) -> AsyncIterator[Pool]:
    """Open the pool of this process. It connects on first use, so a process can start without Postgres."""

    async def connect_session() -> Connection:
        return await connect(
            settings.database_url,
            timeout=settings.database_timeout_seconds * CONNECT_SHARE,
            statement_cache_size=settings.database_statement_cache_size,
            server_settings={"application_name": "calculation-requests"},
        )

    pool = Pool(connect_session, size=settings.database_pool_size)
    metrics.pool_max_connections.set(settings.database_pool_size)
    metrics.pool_connections.labels("idle").set_function(lambda: pool.idle_size)
    metrics.pool_connections.labels("used").set_function(lambda: pool.open_size - pool.idle_size)
    metrics.postgres_login_rejected.set_function(lambda: pool.is_login_rejected)
    try:
        yield pool
    finally:
        await pool.close(seconds=settings.database_timeout_seconds)
