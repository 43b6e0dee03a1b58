"""Looks for work: which lanes of the outbox have events to publish, and where to start reading them."""

from collections.abc import Sequence

import msgspec

from service.outbox.lanes import LANES
from service.postgres.pool import Connection


class Work(msgspec.Struct, frozen=True):
    """What a look at the outbox found, and which transactions it could see.

    All transactions below *xmin* had ended, and none from *next_xid* on had begun. pg_snapshot_xmax() is not
    next_xid. It is one past the last transaction that has ended, and transactions from there on may be open.
    In a transaction that has no id yet, age(xmax) is the distance from xmax to the next id to be assigned, so
    the sum of both is next_xid.
    """

    first_ids: list[int | None]  # the first id in outbox of each lane, from its mark on
    due_lanes: list[int]  # with events in outbox_held that are due for an attempt
    last_id: int  # the last event id that had been assigned
    xmin: int
    next_xid: int

    @property
    def lanes(self) -> list[int]:
        """The lanes in which something can be published now."""
        pending = {lane for lane, first_id in enumerate(self.first_ids) if first_id is not None}
        return list(pending.union(self.due_lanes))


class LaneMarks:
    """The low-water mark of each lane: the id below which it has no event, and never will.

    The relay reads a lane from its mark on. While an old snapshot is held, vacuum cannot remove deleted
    events, and a read from the start of the lane would step over all of them each time.

    Ids are assigned before transactions commit, so a gap between ids may still be filled. It takes three
    looks to rule that out. For example, transaction 700 has the event id 11, and has not committed yet:

    1. The first look finds the lane empty and 11 as the last id, so 12 is the candidate. It cannot show which
       transactions to wait for: 700 may have begun after its snapshot, before it read the last id.
    2. The second look began later, so 700 is below its next_xid, 705: the trigger outbox_number_transaction
       in schema.sql assigns a transaction its number before an event id.
    3. A later look has an xmin of 705 or more, so 700 has ended. If it finds 11, the mark is 11, otherwise
       12. It is the first look of the next round, too.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Read every lane from its start again, because a crash or failover of Postgres may undo commits."""
        self.low_water = [0] * LANES
        self._candidates = self.low_water
        self._awaited: int | None = 0  # All transactions below it must end; None until a round's second look.

    def note(self, work: Work) -> None:
        """Record a look at all lanes."""
        if work.last_id + 1 < max(self.low_water):  # The sequence was set back, by hand or by a failover.
            self.forget()
        elif self._awaited is None:
            self._awaited = work.next_xid
        elif work.xmin >= self._awaited:
            first_ids = [work.last_id + 1 if first is None else first for first in work.first_ids]
            self.low_water = [min(pair) for pair in zip(self._candidates, first_ids, strict=True)]
            self._candidates, self._awaited = first_ids, None


async def find_work(connection: Connection, marks: Sequence[int]) -> Work:
    """Look for events that can be published now, from the low-water *marks* of the lanes on."""
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
