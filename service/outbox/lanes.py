"""The lane that an event is written to, its lock, and the NOTIFY that wakes the relays."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID

import asyncpg

from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool

LANES = 16
LOCKS = 0x0B0C  # the first key of the advisory locks; the second is the lane
CHANNEL = "outbox"  # for LISTEN and NOTIFY

_PAUSE_SECONDS = 0.005  # between two NOTIFYs


def lane_of(request_id: UUID) -> int:
    """Return the lane of a request. All its events share it, so any number of relays keep them in order."""
    return request_id.int % LANES


async def lock(connection: Connection, lane: int) -> None:
    """Wait for a lane's lock, and hold it until the transaction ends. Use this in a `bounded_transaction`.

    A relay holds the lock during a pass, because the rows that it has read must not change. Raises
    asyncpg.LockNotAvailableError if a relay waits long for RabbitMQ meanwhile.
    """
    await connection.execute("SELECT pg_advisory_xact_lock($1, $2)", LOCKS, lane)


async def try_lock(connection: Connection, lanes: Sequence[int]) -> list[int]:
    """Lock the free lanes among *lanes* until the transaction ends, and return them.

    Read the lanes in a later statement, which sees all that previous holders of the locks committed.

    Raises PostgresUnavailable on a read-only server, which would grant the locks but reject later writes.
    """
    (row,) = await connection.fetch(
        """
        SELECT ARRAY (SELECT lane
                        FROM unnest($2::smallint[]) AS lane
                       WHERE pg_try_advisory_xact_lock($1, lane)) AS lanes,
               current_setting('transaction_read_only')::boolean AS is_read_only
        """,
        LOCKS,
        lanes,
    )
    if row["is_read_only"]:
        raise PostgresUnavailable.counted()
    return list(row["lanes"])


async def notify(connection: Connection) -> None:
    """Wake the relays. Not used in transactions that write, because NOTIFY makes commits queue for a lock.

    With a NOTIFY in every commit, 12,700 creates per second fell to 3,600. A NOTIFY is rejected while the
    server's queue for NOTIFY is full. Then the relays find the events by polling.
    """
    with suppress(asyncpg.ProgramLimitExceededError):
        await connection.execute("SELECT pg_notify($1, '')", CHANNEL)


class RelayWaker:
    """Wakes the relays after commits. If a NOTIFY is lost, the relays find the events by polling.

    After a quiet time, a NOTIFY is sent at once. Otherwise all commits during a pause share one.
    """

    def __init__(self, pool: Pool, *, seconds: float) -> None:
        self._pool = pool
        self._seconds = seconds
        self._committed = asyncio.Event()

    def wake(self) -> None:
        """Record a commit. Returns at once."""
        self._committed.set()

    async def run(self) -> None:
        """Send a NOTIFY after commits, until cancelled."""
        while True:
            await self._committed.wait()
            self._committed.clear()
            with suppress(PostgresUnavailable):
                async with connections.acquired(self._pool, seconds=self._seconds) as connection:
                    await notify(connection)
            await asyncio.sleep(_PAUSE_SECONDS)
