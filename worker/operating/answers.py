"""The answers of operator commands: a table for people, JSON for scripts, or an error in one line."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec

_WIDEST_CELL = 100


class OperatorError(Exception):
    """The command failed. The message, or else the docstring of the subclass, is printed as one line."""


class Answer(msgspec.Struct, frozen=True):
    """The result of a command, as data for scripts and as text for people, with the exit status."""

    data: object
    text: str
    status: int = 0

    def rendered(self, *, as_json: bool) -> str:
        """Return what is printed to stdout."""
        if as_json:
            return msgspec.json.format(msgspec.json.encode(self.data), indent=2).decode()
        return self.text


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return *rows* in aligned columns, numbers to the right."""
    written = [[cell(value) for value in row] for row in rows]
    numeric = [all(_is_number(row[column]) for row in written) for column in range(len(headings))]
    widths = [max(map(len, column)) for column in zip(headings, *written, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in (headings, *written)
    )


def cell(value: object) -> str:
    """Return a value as text for a table, truncated if it is long."""
    match value:
        case None:
            return "-"
        case datetime():
            return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        case float():
            return f"{value:.1f}"
    text = printable(str(value))
    return text if len(text) <= _WIDEST_CELL else text[: _WIDEST_CELL - 1] + "…"


def printable(text: str) -> str:
    """Return *text* with control and bidirectional characters escaped: they could manipulate the terminal."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(".", "", 1).isdigit()
