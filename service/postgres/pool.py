"""The pool of Postgres connections: one per process, filled on demand, with a bounded queue."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeAlias

import asyncpg

from service.addresses import connect_to_any
from service.postgres.outages import PostgresUnavailable
from service.settings import CONNECT_SHARE, Settings
from service.telemetry import metrics

Connection: TypeAlias = "asyncpg.Connection[Any]"

_QUEUE_PER_CONNECTION = 32  # callers that may wait per connection
_LARGEST_SHARE = 0.5  # of the queue, for one party
_RECONNECT_PAUSE_SECONDS = 0.25  # after a failed attempt to connect, so that rejecting callers is cheap
_LONGEST_IDLE_SECONDS = 200.0  # Networks drop idle connections silently, usual balancers after 240 s.


class Pool:
    """A lazily filled connection pool with a bounded queue, in which callers wait for their turn.

    asyncpg's own pool was tried. Its queue is unbounded, so Postgres works for callers that have given up; it
    took 41 µs more a statement; and callers got 503 where Postgres grants fewer connections than it may open.
    Here they wait for one in use. Sessions are not reset, because settings end with a transaction.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._queue_size = _QUEUE_PER_CONNECTION * settings.database_pool_size
        self._queue: list[str | None] = []  # the party of each caller that waits
        # A caller that has its turn takes an idle connection, or opens one.
        self._turns = asyncio.Semaphore(settings.database_pool_size)
        self.opened: set[Connection] = set()  # without those that are being closed
        self.opened_count = 0  # connections opened so far
        self.idle: dict[Connection, float] = {}  # with the time of release; last in, first out
        self._retiring: set[asyncio.Task[None]] = set()
        self._reconnect_after = -math.inf
        self._connect_error: Exception | None = None  # of the latest attempt

    @property
    def is_login_rejected(self) -> bool:
        """Whether Postgres rejected the login at the latest attempt to connect."""
        return isinstance(self._connect_error, asyncpg.InvalidAuthorizationSpecificationError)

    def check_available(self) -> None:
        """Raise PostgresUnavailable if the queue is full, or no connection is open and connecting failed."""
        is_down = not self.opened and time.monotonic() < self._reconnect_after
        if is_down or len(self._queue) >= self._queue_size:
            raise PostgresUnavailable.counted()

    @contextmanager
    def place_in_queue(self, party: str | None) -> Iterator[None]:
        """Take a place in the queue for the block. Raises PostgresUnavailable if there is none.

        Callers of one *party* may take half of the places, and those without one, as in the worker, all.
        """
        share = self._queue_size if party is None else self._queue_size * _LARGEST_SHARE
        if len(self._queue) >= self._queue_size or self._queue.count(party) >= share:
            raise PostgresUnavailable.counted()
        self._queue.append(party)
        try:
            yield
        finally:
            self._queue.remove(party)

    async def acquire(self, *, queue_seconds: float, party: str | None = None) -> Connection:
        """Return a connection. The caller sets its own deadline, and must release or retire the connection.

        Raises PostgresUnavailable at once if there is no place in the queue, or if no connection is open and
        connecting has just failed. Raises TimeoutError after *queue_seconds* in the queue, because too little
        time is left then. Raises what asyncpg raises while connecting.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + queue_seconds
        while True:
            if self._turns.locked():
                with self.place_in_queue(party):
                    async with asyncio.timeout_at(until):
                        await self._turns.acquire()
            else:
                await self._turns.acquire()  # at once
            try:
                connection = self._take_idle() or await self._open()
            except BaseException:
                self._turns.release()
                raise
            if connection is not None:
                return connection
            # Until the pool may connect again, only connections that are open can serve a turn.
            loop.call_later(_RECONNECT_PAUSE_SECONDS, self._turns.release)

    def release(self, connection: Connection) -> None:
        """Pass the connection on to the next caller if it is usable; close it otherwise."""
        if connection.is_closed() or connection.is_in_transaction():
            connection.terminate()
        else:
            self.idle[connection] = time.monotonic()
        self._turns.release()

    def retire(self, connection: Connection, *, seconds: float) -> None:
        """Close a connection in the background. Its turn lasts until then, because its statement may."""

        async def close() -> None:
            with suppress(Exception):  # The connection is closed even then.
                await connection.close(timeout=seconds)  # cancels the running statement first
            self._turns.release()

        self.opened.discard(connection)
        closing = asyncio.create_task(close())
        self._retiring.add(closing)
        closing.add_done_callback(self._retiring.discard)

    async def close(self, *, seconds: float) -> None:
        """Close every connection, and cancel running statements."""
        for connection in [*self.opened]:
            self.retire(connection, seconds=seconds)
        await asyncio.gather(*self._retiring)

    def _take_idle(self) -> "Connection | None":
        while self.idle:
            connection, released = self.idle.popitem()
            if not connection.is_closed() and time.monotonic() - released < _LONGEST_IDLE_SECONDS:
                return connection
            connection.terminate()
        return None

    async def _open(self) -> "Connection | None":
        """Open a connection. Returns None if this fails while other connections are open."""
        if time.monotonic() < self._reconnect_after:
            if self.opened:
                return None
            raise PostgresUnavailable.counted() from self._connect_error
        try:
            connection = await connect(
                self._settings.database_url,
                timeout=self._settings.database_timeout_seconds * CONNECT_SHARE,
                statement_cache_size=self._settings.database_statement_cache_size,
                server_settings={"application_name": "calculation-requests"},
            )
        except Exception as error:
            self._connect_error = error
            self._reconnect_after = time.monotonic() + _RECONNECT_PAUSE_SECONDS
            if self.opened:
                return None
            raise
        self._reconnect_after = -math.inf
        self._connect_error = None
        self.opened_count += 1
        self.opened.add(connection)
        connection.add_termination_listener(lambda _: self._forget(connection))
        return connection

    def _forget(self, connection: Connection) -> None:
        self.opened.discard(connection)
        self.idle.pop(connection, None)


async def connect(url: str, *, timeout: float, **options: Any) -> Connection:  # noqa: ANN401, ASYNC109 - asyncpg's
    """Connect to Postgres with asyncpg's *options*. A user without the right CONNECT is a rejected login."""
    until = time.monotonic() + timeout
    try:
        # Each attempt ends by itself, so that a rejected login is reported although another host is silent.
        return await connect_to_any(
            lambda: asyncpg.connect(url, timeout=until - time.monotonic(), **options), seconds=timeout
        )
    except asyncpg.InsufficientPrivilegeError as error:
        raise asyncpg.InvalidAuthorizationSpecificationError(str(error)) from error


@asynccontextmanager
async def open_pool(settings: Settings) -> AsyncIterator[Pool]:
    """Open the pool of this process. It connects on first use, so a process can start without Postgres."""
    pool = Pool(settings)
    metrics.pool_max_connections.set(settings.database_pool_size)
    metrics.pool_connections.labels("idle").set_function(lambda: len(pool.idle))
    metrics.pool_connections.labels("used").set_function(lambda: len(pool.opened) - len(pool.idle))
    metrics.postgres_login_rejected.set_function(lambda: pool.is_login_rejected)
    try:
        yield pool
    finally:
        await pool.close(seconds=settings.database_timeout_seconds)
