"""Comparisons: sides measured in turn, round after round, and the bars that we set ourselves."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec

PER_SECOND = "per second"

Figures = Mapping[str, float]  # by name and unit, such as "per second" or "p99 ms"
Measure = Callable[[], Awaitable[Figures]]


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """What a figure of *side* must be: in itself, or as a ratio to the same figure of another side."""

    side: str
    of: str | None = None
    figure: str = PER_SECOND
    kind: Literal["at least", "at most"] = "at least"
    limit: float
    is_aim: bool = False  # what we would like; nobody has failed who misses it

    def is_met_by(self, value: float) -> bool:
        """Whether *value* is on the right side of the bar."""
        return value >= self.limit if self.kind == "at least" else value <= self.limit


class Comparison(msgspec.Struct, kw_only=True):
    """What was measured: a figure for every side and round. The first side is ours."""

    name: str
    bars: Sequence[Bar] = ()
    rounds: dict[str, list[Figures]] = {}
    note: str = ""

    @property
    def ours(self) -> str:
        """The side that the others are set against."""
        return next(iter(self.rounds))

    def median(self, side: str, figure: str) -> float:
        """Return the median of all rounds."""
        return median(figures[figure] for figures in self.rounds[side])

    def ratio(self, side: str, of: str, figure: str) -> float:
        """Return the median ratio of two sides that were measured one after the other."""
        pairs = zip(self.rounds[side], self.rounds[of], strict=True)
        return median(ours[figure] / theirs[figure] for ours, theirs in pairs)

    def value(self, bar: Bar) -> float:
        """Return what a bar is held against."""
        if bar.of is None:
            return self.median(bar.side, bar.figure)
        return self.ratio(bar.side, bar.of, bar.figure)

    def bars_met(self) -> list[tuple[Bar, bool]]:
        """Return every bar that could be measured, and whether it is met."""
        return [(bar, bar.is_met_by(self.value(bar))) for bar in self.bars if self._has(bar)]

    def _has(self, bar: Bar) -> bool:
        sides = {bar.side, bar.of or bar.side}
        return all(bar.figure in figures for side in sides for figures in self.rounds.get(side, [{}]))


async def compare(
    name: str,
    sides: Mapping[str, Measure],
    bars: Sequence[Bar] = (),
    *,
    rounds: int,
    settle: Callable[[], Awaitable[None]],
    note: str = "",
) -> Comparison:
    """Measure all *sides* in turn, *rounds* times: the machine's moods meet all alike.

    Every other round goes backwards, and *settle* comes before each side, so that none gains or loses by
    what is measured before it.
    """
    comparison = Comparison(name=name, bars=bars, rounds={side: [] for side in sides}, note=note)
    for number in range(rounds):
        for side, measure in list(sides.items())[:: -1 if number % 2 else 1]:
            await settle()
            comparison.rounds[side].append(await measure())
    return comparison
