"""How many e-mails may be sent now, where their rate is limited."""

import math
import time
from collections.abc import Callable


class Allowance:
    """At most *per_second* e-mails a second, those of up to one second at once; 0 is no limit."""

    def __init__(self, per_second: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._clock = clock
        self._most = max(1.0, per_second)
        self._left = self._most
        self._counted_at = clock()

    def at_most(self, number: int) -> int:
        """Return how many of *number* e-mails may be sent now."""
        if not self._per_second:
            return number
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._counted_at) * self._per_second)
        self._counted_at = now
        return min(number, math.floor(self._left))

    def use(self, number: int) -> None:
        """Note that *number* e-mails are being sent."""
        if self._per_second:
            self._left -= number

    @property
    def wait_seconds(self) -> float:
        """The time until another e-mail may be sent."""
        return max(0.0, 1 - self._left) / self._per_second if self._per_second else 0.0
