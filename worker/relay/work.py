"""Finds the lanes of the outbox that have events to publish, and the id from which to read each lane."""

from collections.abc import Sequence

import msgspec

from service.outbox.lanes import LANES
from service.postgres.pool import Connection


class Work(msgspec.Struct, frozen=True):
    """What `find_work` found in the outbox, and which transactions had ended or begun by then.

    All transactions with an xid below *xmin* had ended. No xid from *next_xid* on had been assigned.
    pg_snapshot_xmax() may be lower than next_xid. It is one above the xid of the last transaction that has
    ended, and later transactions may be open. In a session without an xid, age(xmax) is the distance from
    xmax to the next xid that Postgres assigns. So xmax + age(xmax) is next_xid.
    """

    first_ids: list[int | None]  # by lane: the first id in outbox from the low-water mark on
    due_lanes: list[int]  # the lanes with events in outbox_held that are due
    last_id: int  # the last event id that had been assigned
    xmin: int
    next_xid: int

    @property
    def lanes(self) -> list[int]:
        """The lanes in which something can be published now."""
        pending = {lane for lane, first_id in enumerate(self.first_ids) if first_id is not None}
        return list(pending.union(self.due_lanes))


class LaneMarks:
    """The low-water mark of each lane. The lane has no event with a lower id, and never will.

    The relay reads a lane from its mark on. During a backup, for example, vacuum cannot remove deleted
    events, and each read from the start of the lane would step over all of them.

    An event gets its id before its transaction commits. So an event with an id below the last one may still
    appear. A round of three results of `find_work` rules this out. For example, transaction 700 has written
    event 11, but has not committed yet:

    1. The first result has no event in the lane, and 11 as the last id. So the candidate for the mark is 12.
       700 may have begun after this result's snapshot, but before the last id was read.
    2. The second result has 705 as next_xid. 700 must be lower, because the trigger outbox_number_transaction
       in schema.sql gives a transaction its xid before an event id.
    3. A later result has an xmin of 705 or more, so 700 has ended. If this result has event 11, the mark
       becomes 11, otherwise 12. This result is also the first of the next round.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Read every lane from its start again. A crash or failover of Postgres may have undone commits."""
        self.low_water = [0] * LANES
        self._candidates = self.low_water
        # A round ends once all transactions with lower xids have ended. None between its first two results; 0
        # lets the next result begin a round.
        self._awaited: int | None = 0

    def note(self, work: Work) -> None:
        """Update the marks with the next result of `find_work`."""
        if work.last_id + 1 < max(self.low_water):  # The sequence was set back, by hand or by a failover.
            self.forget()
        elif self._awaited is None:
            self._awaited = work.next_xid
        elif work.xmin >= self._awaited:
            first_ids = [work.last_id + 1 if first is None else first for first in work.first_ids]
            self.low_water = [min(pair) for pair in zip(self._candidates, first_ids, strict=True)]
            self._candidates, self._awaited = first_ids, None


async def find_work(connection: Connection, marks: Sequence[int]) -> Work:
    """Find events that can be published now. Each lane is read from its low-water mark on."""
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
               -- see Work
               pg_snapshot_xmax(snapshot)::text::bigint + age(pg_snapshot_xmax(snapshot)::xid) AS next_xid
          FROM pg_current_snapshot() AS snapshot,
               outbox_id_seq AS sequence
        """,
        marks,
    )
    return Work(**row)
