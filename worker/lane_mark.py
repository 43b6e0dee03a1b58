"""From where on to read a lane: behind the events that are gone, though vacuum may not remove them yet."""

import time
from collections.abc import Sequence

from service.outbox import Snapshot

_FORGET_SECONDS = 60.0


class LaneMark:
    """The id below which no event of a lane is left, nor can appear any more.

    Ids are given out before transactions commit, so a gap may still be filled: the mark passes it only once
    every transaction has ended that was under way after the gap was seen. The proof takes three passes: one
    sees the gap, the next one notes which transactions are under way, and a later one finds them ended. As a
    precaution the mark starts anew every minute.
    """

    def __init__(self, *, forget_seconds: float = _FORGET_SECONDS) -> None:
        self._forget_seconds = forget_seconds
        self._start_anew()

    def _start_anew(self) -> None:
        self._low_water = 0
        self._candidate = 0
        self._awaited: int | None = None  # all transactions below this must have ended
        self._highest = 0
        self._forget_at = time.monotonic() + self._forget_seconds

    @property
    def low_water(self) -> int:
        """The id to read from on. An idle lane starts anew too: it might hold what the mark has passed."""
        if time.monotonic() > self._forget_at:
            self._start_anew()
        return self._low_water

    def advance(self, snapshot: Snapshot, ids: Sequence[int]) -> None:
        """Take note of one pass: the snapshot taken before it read, and the ids it read, in order."""
        first = ids[0] if ids else self._highest + 1
        self._highest = max(self._highest, *ids) if ids else self._highest
        if self._candidate <= self._low_water:
            self._candidate, self._awaited = first, None
        elif self._awaited is None:
            self._awaited = snapshot.xmax
        elif snapshot.xmin >= self._awaited:
            self._low_water = min(self._candidate, first)
            self._candidate, self._awaited = first, None
