"""The low-water mark of each lane: the id from which the relay reads it.

While an old snapshot is held, vacuum cannot remove deleted events. Reading from the start of a lane would
step over all of them each time.
"""

from collections.abc import Sequence

import structlog

from service.outbox.lanes import LANES
from worker.relay.lanes import Snapshot, Work

_log = structlog.get_logger()


class LaneMark:
    """The id below which a lane has no event, and never will.

    Ids are given out before transactions commit, so a gap between ids may still be filled. The mark passes
    it only once every transaction that was open after the gap was seen has ended. That takes three looks: the
    first sees the gap, the next records which transactions are open, a later one finds that they have ended.
    """

    def __init__(self) -> None:
        self.low_water = 0
        self._candidate = 0
        self._awaited: int | None = None  # transactions below this must end first

    def advance(self, snapshot: Snapshot, first: int) -> None:
        """Record one look at the lane.

        *first* is the lowest id in it, or the next id to be given out if it was empty.
        """
        if self._candidate <= self.low_water:
            self._candidate, self._awaited = first, None
        elif self._awaited is None:
            self._awaited = snapshot.next_xid
        elif snapshot.xmin >= self._awaited:
            self.low_water = min(self._candidate, first)
            self._candidate, self._awaited = first, None


class LaneMarks:
    """The low-water marks of all lanes."""

    def __init__(self) -> None:
        self._marks = [LaneMark() for _ in range(LANES)]

    @property
    def low_water(self) -> list[int]:
        """The id from which to read each lane. Below it are no events, at most dead entries of the index."""
        return [mark.low_water for mark in self._marks]

    def note_work(self, work: Work) -> None:
        """Record a look at all lanes: those without fresh work are empty from their mark on.

        A mark above the last id means that a failover has lost events and their ids are given out again. Then
        all lanes are read from their start.
        """
        if work.last_id + 1 < max(self.low_water):
            _log.warning("outbox_ids_set_back", last_id=work.last_id)
            self.forget_all()
            return
        for lane, mark in enumerate(self._marks):
            if lane not in work.fresh_lanes:
                mark.advance(work.snapshot, work.last_id + 1)

    def note_first(self, snapshot: Snapshot, lane: int, first_id: int) -> None:
        """Record the first event of a lane from its mark on."""
        self._marks[lane].advance(snapshot, first_id)

    def forget(self, lanes: Sequence[int]) -> None:
        """Read these lanes from their start again."""
        for lane in lanes:
            self._marks[lane] = LaneMark()

    def forget_all(self) -> None:
        """Read every lane from its start again."""
        self.forget(range(LANES))
