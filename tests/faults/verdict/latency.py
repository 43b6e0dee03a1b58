"""The latency from commit to auditor, and when it is normal again after a fault."""

import time
from collections import deque
from collections.abc import Mapping
from statistics import quantiles

import msgspec

from service.outbox.lanes import LANES

BAR_SECONDS = 1.0
_REMEMBERED = 20_000  # commits; minutes of them
_SAMPLES = 200_000


class Commit(msgspec.Struct):
    """A request whose commit was acknowledged."""

    at: float
    lane: int
    seconds: float | None = None  # until the auditor got its event

    def is_late(self, now: float) -> bool:
        """Whether it took longer than the bar, or has by now."""
        return (now - self.at if self.seconds is None else self.seconds) >= BAR_SECONDS


class Latencies:
    """Matches commits with the arrivals of their request.created."""

    def __init__(self) -> None:
        self._commits: deque[Commit] = deque(maxlen=_REMEMBERED)
        self._waiting: dict[str, Commit] = {}
        self._early: dict[str, float] = {}  # arrived before the commit was acknowledged
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    def committed(self, key: str, lane: int) -> None:
        """Note that the commit of a request has just been acknowledged."""
        commit = Commit(time.monotonic(), lane)
        self._commits.append(commit)
        self._waiting[key] = commit
        arrived_at = self._early.pop(key, None)
        if arrived_at is not None:
            self.arrived(key, arrived_at)

    def arrived(self, key: str, at: float) -> None:
        """Note that a request.created has arrived."""
        commit = self._waiting.pop(key, None)
        if commit is None:
            self._early[key] = at
            return
        commit.seconds = max(0.0, at - commit.at)
        self._samples.append(commit.seconds)

    def forget(self, key: str) -> None:
        """Note that the commit of a request has an unknown outcome."""
        self._early.pop(key, None)

    def recovered_after(self, end: float) -> float | None:
        """Return when, after *end*, latencies fell below the bar for good; None while they have not.

        Every lane must show it: a single one may be stuck.
        """
        now = time.monotonic()
        began: float | None = None
        lanes: set[int] = set()
        for commit in self._commits:
            if commit.at < end:
                continue
            if commit.is_late(now):
                began = None
                lanes.clear()
            elif commit.seconds is None:
                return None  # It is too early to know.
            else:
                began = commit.at if began is None else began
                lanes.add(commit.lane)
            if len(lanes) == LANES:
                return began
        return None

    def summary(self) -> Mapping[str, float]:
        """Return quantiles of all latencies, in seconds."""
        if len(self._samples) < 2:
            return {}
        cuts = quantiles(self._samples, n=1000)
        return {"p50": cuts[499], "p99": cuts[989], "p99.9": cuts[998], "max": max(self._samples)}
