"""What a failed test shows: its cause, and the path of a file with all that was written meanwhile."""

import re
from collections.abc import Callable, Mapping
from typing import Final

import pytest

from deploy.local.machine.folders import LOCAL

_FOLDER: Final = LOCAL / "failures"
_SHOWN_LINES: Final = 3  # Of each section: more would push the cause out of sight.


def shorten(report: pytest.TestReport, logs: Mapping[str, Callable[[], str]]) -> None:
    """Move the output of a failed test, and the ends of the servers' *logs*, into a file that it names."""
    sections = [*report.sections, *((f"End of {name}'s log", end()) for name, end in logs.items())]
    name = re.sub(r"\W+", "-", f"{report.nodeid}-{report.when}")
    file = _FOLDER / f"{name[-200:]}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(f"{title}:\n{text}" for title, text in sections))
    short = [(title, text) for title, text in report.sections if len(text.splitlines()) <= _SHOWN_LINES]
    report.sections = [*short, ("Output, and the ends of the servers' logs", str(file))]
