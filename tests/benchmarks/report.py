"""What was measured, as text."""

from collections.abc import Iterator, Sequence

from tests.benchmarks.comparison import Bar, Comparison


def table(comparisons: Sequence[Comparison]) -> str:
    """Return a line for every figure of every side, and below them one for every bar."""
    return "\n".join(line for comparison in comparisons for line in (*_lines(comparison), ""))


def _lines(comparison: Comparison) -> Iterator[str]:
    yield comparison.name
    for side, rounds in comparison.rounds.items():
        for figure in rounds[0]:
            yield f"  {side:32}{_number(comparison.median(side, figure)):>8} {figure}"
    for bar, met in comparison.bars_met():
        value = _number(comparison.value(bar))
        yield f"  {_subject(bar)}: {value}, {bar.kind} {bar.limit:g}: {'met' if met else 'MISSED'}"


def _subject(bar: Bar) -> str:
    return f"{bar.side}, {bar.figure}" if bar.of is None else f"{bar.side} / {bar.of}, {bar.figure}"


def _number(value: float) -> str:
    """Return a figure with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
