"""Connections and transactions from the pool, each with a deadline."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.postgres.outages import PostgresUnavailable, is_harmless, is_outage
from service.postgres.pool import Connection, Pool
from service.settings import QUEUE_SHARE
from service.telemetry import metrics

# SQL that makes the commit wait for a synchronous standby even if the transaction writes nothing else. If
# such a wait is cancelled, Postgres keeps the commit, but a failover may lose it. So the transaction of a
# repeated create or message must wait for the standby, even if the transaction changes nothing.
REPLICATE = "pg_logical_emit_message(true, 'replicate', '')"

_SHORT_SECONDS = 5.0  # for BEGIN and for closing, so that a half-open connection is soon given up
SILENCE_SECONDS = 3.0  # the longest that a transaction may be idle before Postgres ends the session


@asynccontextmanager
async def acquired(pool: Pool, *, seconds: float, party: str | None = None) -> AsyncIterator[Connection]:
    """Acquire a connection from the pool, for at most *seconds*. Waiting for it may take half of that.

    A *party* may take half of the places in the pool's queue. An interrupted statement is cancelled in the
    background. Raises PostgresUnavailable if Postgres or the pool does not respond in time.
    """
    began = time.perf_counter()
    try:
        async with asyncio.timeout(seconds):
            connection = await pool.acquire(queue_seconds=seconds * QUEUE_SHARE, party=party)
            metrics.pool_wait_seconds.observe(time.perf_counter() - began)
            try:
                yield connection
            except BaseException as error:
                if is_harmless(error):
                    pool.release(connection)
                else:
                    pool.retire(connection, seconds=min(seconds, _SHORT_SECONDS))
                raise
            pool.release(connection)
    except Exception as error:
        if is_outage(error):
            raise PostgresUnavailable.counted() from error
        raise


def allow_silence(seconds: float) -> str:
    """Return SQL that makes Postgres end the session if this transaction is idle for *seconds*."""
    return f"SET LOCAL idle_in_transaction_session_timeout = '{seconds * 1000:.0f}ms'"


@asynccontextmanager
async def transaction(
    pool: Pool, *, seconds: float, party: str | None = None, settings: str = ""
) -> AsyncIterator[Connection]:
    """Acquire a connection, as `acquired` does, and open a transaction, with *settings* in SQL.

    Postgres ends the session if the transaction is idle for SILENCE_SECONDS. Otherwise, if a client's machine
    disappeared from the network, the client's locks would be held until TCP noticed two hours later.
    """
    begin = f"BEGIN ISOLATION LEVEL READ COMMITTED; {allow_silence(SILENCE_SECONDS)}; {settings}"
    async with acquired(pool, seconds=seconds, party=party) as connection:
        try:
            await connection.execute(begin, timeout=min(seconds, _SHORT_SECONDS))  # in one round trip
            yield connection
            await connection.execute("COMMIT")
        except Exception:  # After a cancellation no time is left, and the connection is closed.
            await connection.execute("ROLLBACK")
            raise
