"""From where on to read a lane: behind the events that are gone, though vacuum may not remove them yet."""

from collections.abc import Sequence

import structlog

from service.outbox import writing
from worker.relay.outbox import Due, Snapshot

_log = structlog.get_logger()


class LaneMark:
    """The id below which no event of a lane is left, nor can appear any more.

    Ids are given out before transactions commit, so a gap may still be filled: the mark passes it only once
    every transaction has ended that was under way after the gap was seen. The proof takes three looks: one
    sees the gap, the next one notes which transactions are under way, and a later one finds them ended.
    """

    def __init__(self) -> None:
        self.low_water = 0
        self._candidate = 0
        self._awaited: int | None = None  # all transactions below this must have ended

    def advance(self, snapshot: Snapshot, first: int) -> None:
        """Take note of one look: its snapshot, and the first id that was there or had not been given out."""
        if self._candidate <= self.low_water:
            self._candidate, self._awaited = first, None
        elif self._awaited is None:
            self._awaited = snapshot.next_xid
        elif snapshot.xmin >= self._awaited:
            self.low_water = min(self._candidate, first)
            self._candidate, self._awaited = first, None


class LaneMarks:
    """The marks of all lanes."""

    def __init__(self) -> None:
        self._marks = [LaneMark() for _ in range(writing.LANES)]

    @property
    def low_water(self) -> list[int]:
        """Where each lane begins: no event is left before that, though entries of the index may be."""
        return [mark.low_water for mark in self._marks]

    def note_due(self, due: Due) -> None:
        """Take note of a look at all lanes behind their marks: what is not due there is empty.

        Marks above the last id are of another history, which a failover has lost: every lane begins anew.
        """
        if due.last_id + 1 < max(self.low_water):
            _log.warning("outbox_ids_set_back", last_id=due.last_id)
            self.forget(range(writing.LANES))
            return
        for lane, mark in enumerate(self._marks):
            if lane not in due.lanes:
                mark.advance(due.snapshot, due.last_id + 1)

    def note_first(self, snapshot: Snapshot, lane: int, first_id: int) -> None:
        """Take note of the first event of a lane behind its mark."""
        self._marks[lane].advance(snapshot, first_id)

    def forget(self, lanes: Sequence[int]) -> None:
        """Read these lanes from their start again."""
        for lane in lanes:
            self._marks[lane] = LaneMark()
