"""How many e-mails may be sent now, where their rate is limited."""

import math
import time
from collections.abc import Callable


class Allowance:
    """At most *per_second* e-mails a second, a tenth of them at once, but at least one; 0 is no limit."""

    def __init__(self, per_second: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._clock = clock
        self._most = max(1.0, per_second / 10)
        self._left = self._most
        self._counted_at = self._paused_until = clock()

    def at_most(self, number: int) -> int:
        """Return how many of *number* e-mails may be sent now."""
        now = self._clock()
        if now < self._paused_until:
            return 0
        if not self._per_second:
            return number
        self._left = min(self._most, self._left + (now - self._counted_at) * self._per_second)
        self._counted_at = now
        return min(number, math.floor(self._left))

    def use(self, number: int) -> None:
        """Note that *number* e-mails are being sent."""
        if self._per_second:
            self._left -= number

    def pause(self, seconds: float) -> None:
        """Allow no e-mail for *seconds*."""
        self._paused_until = self._clock() + seconds

    @property
    def wait_seconds(self) -> float:
        """The time until another e-mail may be sent."""
        refilled = max(0.0, 1 - self._left) / self._per_second if self._per_second else 0.0
        return max(refilled, self._paused_until - self._clock(), 0.0)
