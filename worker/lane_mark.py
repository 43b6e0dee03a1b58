"""From where on to read a lane: behind the events that are gone, though vacuum may not remove them yet."""

from service.outbox import Snapshot


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
            self._awaited = snapshot.xmax
        elif snapshot.xmin >= self._awaited:
            self.low_water = min(self._candidate, first)
            self._candidate, self._awaited = first, None
