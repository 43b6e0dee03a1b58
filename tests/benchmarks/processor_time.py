"""Processor time, as /proc counts it. On a shared machine it varies less than a rate."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.benchmarks.comparison import EACH, IN_POSTGRES, Figures
from tests.harness.servers import children

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Meter:
    """The processor time that a side and Postgres use from now on."""

    def __init__(self, side: int, postgres: int) -> None:
        self._pids = (side, postgres)
        self._before = self._used()

    def figures(self, items: int) -> Figures:
        """Return the microseconds for each of so many items: in all, and of these in Postgres."""
        side, postgres = (
            (now - before) / items * 1e6 for now, before in zip(self._used(), self._before, strict=True)
        )
        return {EACH: side + postgres, IN_POSTGRES: postgres}

    def _used(self) -> list[float]:
        return [sum(_seconds(pid)) for pid in self._pids]


def _seconds(pid: int) -> Iterator[float]:
    """Yield the seconds of a process, with its children that have ended, and of each child that runs."""
    for each in (*children(pid), pid):  # A child that ends meanwhile counts with its parent, which is last.
        with suppress(FileNotFoundError, ProcessLookupError):
            ticks = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[11:15]
            yield sum(map(int, ticks)) / _TICKS_PER_SECOND
