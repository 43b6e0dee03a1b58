"""Comparisons: sides measured in turn, round after round, and the bars they should meet."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec

PER_SECOND = "per second"

Figures = Mapping[str, float]  # by name and unit, such as "per second" or "p99 ms"
Measure = Callable[[], Awaitable[Figures]]


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A limit for a figure of *side*: absolute, or as a ratio to the same figure of another side."""

    side: str
    of: str | None = None
    figure: str = PER_SECOND
    kind: Literal["at least", "at most"] = "at least"
    limit: float


class Comparison(msgspec.Struct, kw_only=True):
    """What was measured: figures for every side and round."""

    name: str
    bars: Sequence[Bar] = ()
    rounds: dict[str, list[Figures]] = {}

    def median(self, side: str, figure: str) -> float:
        """Return the median of all rounds."""
        return median(figures[figure] for figures in self.rounds[side])

    def value(self, bar: Bar) -> float:
        """Return the value that a bar limits. A ratio is the median of the ratios of all rounds."""
        if bar.of is None:
            return self.median(bar.side, bar.figure)
        pairs = zip(self.rounds[bar.side], self.rounds[bar.of], strict=True)
        return median(ours[bar.figure] / theirs[bar.figure] for ours, theirs in pairs)

    def bars_met(self) -> list[tuple[Bar, bool]]:
        """Return every bar whose figures were measured, and whether it is met."""
        return [
            (bar, self.value(bar) >= bar.limit if bar.kind == "at least" else self.value(bar) <= bar.limit)
            for bar in self.bars
            if all(bar.figure in self.rounds[side][0] for side in {bar.side, bar.of or bar.side})
        ]


async def compare(
    name: str,
    sides: Mapping[str, Measure],
    bars: Sequence[Bar] = (),
    *,
    rounds: int,
    settle: Callable[[], Awaitable[None]],
) -> Comparison:
    """Measure all *sides* in turn, *rounds* times, so that other load on the machine affects all alike.

    Every second round is in reverse order, and *settle* is called before each side, so that no side gains or
    loses by the one before it.
    """
    comparison = Comparison(name=name, bars=bars, rounds={side: [] for side in sides})
    for number in range(rounds):
        for side, measure in list(sides.items())[:: -1 if number % 2 else 1]:
            await settle()
            comparison.rounds[side].append(await measure())
    return comparison
