"""The lanes of the outbox: which of them have work, and the locks that keep other relays out."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

from service.outbox.lanes import LOCKS
from service.postgres import loans, outages
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection

_PING_SECONDS = loans.SILENCE_SECONDS / 3


class Snapshot(msgspec.Struct, frozen=True):
    """Which transactions a statement could see: all below xmin had ended, none from next_xid on had begun.

    pg_snapshot_xmax() is not next_xid. It is one past the last transaction that has ended, and transactions
    from there on may be open. In a transaction that has no id yet, age(xmax) is the distance from xmax to the
    next id to be given out, so the sum of both is next_xid.
    """

    xmin: int
    next_xid: int


class Work(msgspec.Struct, frozen=True):
    """The lanes with something to publish, and how far the outbox had got when they were looked up."""

    fresh_lanes: list[int]  # with events in outbox
    due_lanes: list[int]  # with events in outbox_held that are due for an attempt
    snapshot: Snapshot
    last_id: int  # the last event id that had been given out


class Locked(msgspec.Struct, frozen=True):
    """The lanes that were free and are now locked, and what that statement could see."""

    lanes: list[int]
    snapshot: Snapshot


async def find_work(connection: Connection, marks: Sequence[int]) -> Work:
    """Return the lanes in which something can be published now; *marks* are their low-water marks."""
    (row,) = await connection.fetch(
        """
        WITH look AS MATERIALIZED (
            SELECT (number - 1)::smallint AS lane,
                   EXISTS (SELECT
                             FROM outbox
                            WHERE outbox.lane = (number - 1)::smallint
                              AND outbox.id >= low_water) AS has_fresh,
                   EXISTS (SELECT
                             FROM outbox_held
                            WHERE outbox_held.lane = (number - 1)::smallint
                              AND parked_at IS NULL
                              AND next_attempt_at <= now()) AS has_due
              FROM unnest($1::bigint[]) WITH ORDINALITY AS mark (low_water, number)
        )
        SELECT ARRAY (SELECT lane
                        FROM look
                       WHERE has_fresh) AS fresh_lanes,
               ARRAY (SELECT lane
                        FROM look
                       WHERE has_due) AS due_lanes,
               pg_snapshot_xmin(snapshot)::text::bigint AS xmin,
               -- xmax and the transactions that have begun since: see Snapshot
               pg_snapshot_xmax(snapshot)::text::bigint + age(pg_snapshot_xmax(snapshot)::xid) AS next_xid,
               CASE WHEN sequence.is_called THEN sequence.last_value ELSE 0 END AS last_id
          FROM pg_current_snapshot() AS snapshot,
               outbox_id_seq AS sequence
        """,
        marks,
    )
    snapshot = Snapshot(row["xmin"], row["next_xid"])
    return Work(row["fresh_lanes"], row["due_lanes"], snapshot, row["last_id"])


async def find_passed(connection: Connection, marks: Sequence[int]) -> list[int]:
    """Return the lanes with an event below their low-water mark, where there should be none."""
    rows = await connection.fetch(
        """
        SELECT (number - 1)::smallint AS lane
          FROM unnest($1::bigint[]) WITH ORDINALITY AS mark (low_water, number)
         WHERE EXISTS (SELECT
                         FROM outbox
                        WHERE outbox.lane = number - 1
                          AND outbox.id < low_water)
        """,
        marks,
    )
    return [row["lane"] for row in rows]


async def lock_lanes(connection: Connection, lanes: Sequence[int]) -> Locked:
    """Lock those of *lanes* that are free, until the transaction ends.

    This is a statement of its own, so that the next one sees everything the previous holders settled.

    Raises PostgresUnavailable on a read-only server: it would grant the locks, and then refuse to settle.
    """
    (row,) = await connection.fetch(
        """
        SELECT ARRAY (SELECT lane
                        FROM unnest($2::smallint[]) AS lane
                       WHERE pg_try_advisory_xact_lock($1, lane)) AS lanes,
               current_setting('transaction_read_only')::boolean AS is_read_only,
               pg_snapshot_xmin(snapshot)::text::bigint AS xmin,
               -- xmax and the transactions that have begun since: see Snapshot
               pg_snapshot_xmax(snapshot)::text::bigint + age(pg_snapshot_xmax(snapshot)::xid) AS next_xid
          FROM pg_current_snapshot() AS snapshot
        """,
        LOCKS,
        lanes,
    )
    if row["is_read_only"]:
        raise PostgresUnavailable.counted()
    return Locked(row["lanes"], Snapshot(row["xmin"], row["next_xid"]))


@asynccontextmanager
async def lanes_kept(
    connection: Connection, *, ping_seconds: float = _PING_SECONDS
) -> AsyncIterator[asyncio.Event]:
    """Keep the locks of an open transaction while the block does something else, such as publishing.

    Yields an event that is set once the connection is lost, and with it the locks: the block should end then.
    Raises PostgresUnavailable at the end if they were lost.
    """
    lost, done = asyncio.Event(), asyncio.Event()

    def note_loss(_: object) -> None:
        lost.set()

    connection.add_termination_listener(note_loss)
    pinging = asyncio.create_task(_ping(connection, lost, done, ping_seconds))
    try:
        yield lost
    finally:
        done.set()
        await pinging  # Not cancelled: cancelling its query would abort the transaction.
        connection.remove_termination_listener(note_loss)
    if lost.is_set():
        raise PostgresUnavailable


async def _ping(connection: Connection, lost: asyncio.Event, done: asyncio.Event, seconds: float) -> None:
    """Query Postgres until *done*, because it ends a transaction that is silent for SILENCE_SECONDS."""
    while not lost.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await done.wait()
                return
        try:
            await connection.execute("SELECT 1", timeout=seconds)
        except outages.OUTAGE_ERRORS:
            lost.set()
