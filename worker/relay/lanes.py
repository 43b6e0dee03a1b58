"""The lanes of the outbox: which of them have work, from where to read them, and their locks."""

from collections.abc import Sequence

import msgspec

from service.outbox.lanes import LANES, LOCKS
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection


class Work(msgspec.Struct, frozen=True):
    """What a look at the outbox found, and which transactions it could see.

    All transactions below *xmin* had ended, and none from *next_xid* on had begun. pg_snapshot_xmax() is not
    next_xid. It is one past the last transaction that has ended, and transactions from there on may be open.
    In a transaction that has no id yet, age(xmax) is the distance from xmax to the next id to be given out,
    so the sum of both is next_xid.
    """

    first_ids: list[int | None]  # the first id in outbox of each lane, from its mark on
    due_lanes: list[int]  # with events in outbox_held that are due for an attempt
    last_id: int  # the last event id that had been given out
    xmin: int
    next_xid: int

    @property
    def lanes(self) -> list[int]:
        """The lanes in which something can be published now."""
        fresh = {lane for lane, first_id in enumerate(self.first_ids) if first_id is not None}
        return list(fresh.union(self.due_lanes))


class LaneMarks:
    """For each lane the id below which it has no event, and never will: the relay reads it from there.

    While an old snapshot is held, vacuum cannot remove deleted events. Reading from the start of a lane would
    step over all of them each time.

    Ids are given out before transactions commit, so a gap between ids may still be filled. The marks pass
    gaps only once every transaction that was open after they were seen has ended. That takes three looks: the
    first sees the gaps, the next records which transactions are open, a later one finds that they have ended.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Read every lane from its start again: a crash or failover of Postgres may have undone commits."""
        self.low_water = [0] * LANES
        self._candidates = self.low_water
        self._awaited: int | None = 0  # Transactions below this must end first.

    def note(self, work: Work) -> None:
        """Record a look at all lanes."""
        if self._awaited is None:
            self._awaited = work.next_xid
        elif work.xmin >= self._awaited:
            first_ids = [work.last_id + 1 if first is None else first for first in work.first_ids]
            self.low_water = [min(pair) for pair in zip(self._candidates, first_ids, strict=True)]
            self._candidates, self._awaited = first_ids, None


async def find_work(connection: Connection, marks: Sequence[int]) -> Work:
    """Look for events that can be published now; *marks* are the low-water marks of the lanes."""
    (row,) = await connection.fetch(
        """
        WITH look AS MATERIALIZED (
            SELECT (number - 1)::smallint AS lane,
                   (SELECT id
                      FROM outbox
                     WHERE outbox.lane = (number - 1)::smallint
                       AND outbox.id >= low_water
                     ORDER BY id
                     LIMIT 1) AS first_id,
                   EXISTS (SELECT
                             FROM outbox_held
                            WHERE outbox_held.lane = (number - 1)::smallint
                              AND next_attempt_at <= now()) AS has_due
              FROM unnest($1::bigint[]) WITH ORDINALITY AS mark (low_water, number)
        )
        SELECT ARRAY (SELECT first_id
                        FROM look
                       ORDER BY lane) AS first_ids,
               ARRAY (SELECT lane
                        FROM look
                       WHERE has_due) AS due_lanes,
               CASE WHEN sequence.is_called THEN sequence.last_value ELSE 0 END AS last_id,
               pg_snapshot_xmin(snapshot)::text::bigint AS xmin,
               -- xmax and the transactions that have begun since: see Work
               pg_snapshot_xmax(snapshot)::text::bigint + age(pg_snapshot_xmax(snapshot)::xid) AS next_xid
          FROM pg_current_snapshot() AS snapshot,
               outbox_id_seq AS sequence
        """,
        marks,
    )
    return Work(**row)


async def lock_lanes(connection: Connection, lanes: Sequence[int]) -> list[int]:
    """Lock those of *lanes* that are free, until the transaction ends. Returns them.

    This is a statement of its own, so that the next one sees everything the previous holders settled.

    Raises PostgresUnavailable on a read-only server: it would grant the locks, and then refuse to settle.
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
    locked: list[int] = row["lanes"]
    return locked
