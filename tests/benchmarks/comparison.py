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
    is_aim: bool = False  # missing it is no failure

    def is_met_by(self, value: float) -> bool:
        """Whether *value* is on the right side of the bar."""
        return value >= self.limit if self.kind == "at least" else value <= self.limit


class Comparison(msgspec.Struct, kw_only=True):
    """What was measured: figures for every side and round. The first side is the product."""

    name: str
    bars: Sequence[Bar] = ()
    rounds: dict[str, list[Figures]] = {}

    @property
    def ours(self) -> str:
        """The side that the others are compared with."""
        return next(iter(self.rounds))

    def median(self, side: str, figure: str) -> float:
        """Return the median of all rounds."""
        return median(figures[figure] for figures in self.rounds[side])

    def ratio(self, side: str, of: str, figure: str) -> float:
        """Return the median over all rounds of the ratio of two sides."""
        pairs = zip(self.rounds[side], self.rounds[of], strict=True)
        return median(ours[figure] / theirs[figure] for ours, theirs in pairs)

    def value(self, bar: Bar) -> float:
        """Return the value that a bar limits."""
        if bar.of is None:
            return self.median(bar.side, bar.figure)
        return self.ratio(bar.side, bar.of, bar.figure)

    def bars_met(self) -> list[tuple[Bar, bool]]:
        """Return every bar whose figures were measured, and whether it is met."""
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
