"""Comparisons: the figures of each side, and the bars they should meet."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec

PER_SECOND, P50, P99 = "per second", "p50 ms", "p99 ms"
EACH, IN_POSTGRES = "µs of processor time each", "µs of these in Postgres"

Figures = Mapping[str, float]  # by name and unit, such as PER_SECOND
Measure = Callable[[], Awaitable[Figures]]


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A limit for a figure of *side*: absolute, or as a ratio to the same figure of another side."""

    side: str
    of: str | None = None
    figure: str = EACH
    kind: Literal["at least", "at most"] = "at least"
    limit: float


class Comparison(msgspec.Struct):
    """What was measured: figures for every side and round."""

    name: str
    bars: Sequence[Bar]
    rounds: dict[str, list[Figures]]

    def value(self, bar: Bar) -> float:
        """Return the value that a bar limits. A ratio is the median of the ratios of all rounds."""
        ours = [figures[bar.figure] for figures in self.rounds[bar.side]]
        if bar.of is None:
            return median(ours)
        theirs = [figures[bar.figure] for figures in self.rounds[bar.of]]
        return median(one / other for one, other in zip(ours, theirs, strict=True))

    def meets(self, bar: Bar) -> bool:
        return self.value(bar) >= bar.limit if bar.kind == "at least" else self.value(bar) <= bar.limit

    def lines(self) -> Iterator[str]:
        """Yield a line for every figure of every side, and one for every bar."""
        yield self.name
        for side, rounds in self.rounds.items():
            for figure in rounds[0]:
                of_rounds = median(figures[figure] for figures in rounds)
                yield f"  {side:32}{_number(of_rounds):>8} {figure}"
        for bar in self.bars:
            sides = f"{bar.side} / {bar.of}" if bar.of else bar.side
            value, outcome = _number(self.value(bar)), "met" if self.meets(bar) else "MISSED"
            yield f"  {sides}, {bar.figure}: {value}, {bar.kind} {bar.limit:g}: {outcome}"
        yield ""


def _number(value: float) -> str:
    """Return a figure with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
