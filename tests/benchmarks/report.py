"""What was measured, as a table."""

from collections.abc import Iterable, Sequence

import msgspec

from tests.benchmarks.comparison import Bar, Comparison


class Row(msgspec.Struct, frozen=True):
    """A line of the table."""

    comparison: str
    side: str
    figure: str
    ratio: str = ""
    bar: str = ""
    met: str = ""


HEAD = Row("comparison", "side", "figure", "ratio", "bar", "met")


def rows(comparison: Comparison) -> Iterable[Row]:
    """Yield a row for every figure of every side, with its bar."""
    met = comparison.bars_met()
    for side, rounds in comparison.rounds.items():
        for figure in rounds[0]:
            here = (each for each in met if _stands_at(each[0], comparison) == (side, figure))
            bar = next(here, None)
            yield Row(
                comparison.name,
                side,
                f"{number(comparison.median(side, figure))} {figure}",
                _ratio(comparison, side, figure, bar[0] if bar else None),
                _bar(bar[0]) if bar else "",
                _verdict(*bar) if bar else "",
            )


def _stands_at(bar: Bar, comparison: Comparison) -> tuple[str, str]:
    """Return side and figure of the row with a bar: the other side's, if the bar is a ratio of ours to it."""
    is_against_ours = bar.of is not None and bar.side == comparison.ours
    return (bar.of or "" if is_against_ours else bar.side, bar.figure)


def _ratio(comparison: Comparison, side: str, figure: str, bar: Bar | None) -> str:
    if bar is not None and bar.of is not None:
        return f"{comparison.value(bar):.2f}"
    ours = comparison.ours
    if side == ours or bar is not None or any(figure not in each for each in comparison.rounds[ours]):
        return ""
    return f"{comparison.ratio(ours, side, figure):.2f}"


def _bar(bar: Bar) -> str:
    sign = "≥" if bar.kind == "at least" else "≤"
    against = "" if bar.of is None else f" {bar.side} / {bar.of}"
    return f"{sign} {bar.limit:g}{against}{' (aim)' if bar.is_aim else ''}"


def _verdict(bar: Bar, is_met: bool) -> str:  # noqa: FBT001 - a pair from bars_met
    return "yes" if is_met else "not yet" if bar.is_aim else "NO"


def table(comparisons: Sequence[Comparison]) -> str:
    """Return a table in Markdown, aligned for the terminal."""
    lines = [HEAD, *(row for comparison in comparisons for row in rows(comparison))]
    cells = [msgspec.structs.astuple(line) for line in lines]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    written = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    written.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(written)


def number(value: float) -> str:
    """Return a figure with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
