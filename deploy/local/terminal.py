"""The person at the terminal: what they are told, and when they want it to end."""

import os
import signal
import sys
from contextlib import suppress

from deploy.local.errors import LocalStackError


class Terminal:
    """Prints lines, and notes the signals that ask for the end."""

    def __init__(self) -> None:
        self._stopping = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def stopping(self) -> bool:
        """Return whether the end was asked for."""
        return self._stopping

    def report(self, line: str) -> None:
        """Print a line now. Nobody may be there to read it any more, which is no trouble."""
        with suppress(OSError):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


def port_from(variable: str, *, default: int) -> int:
    """Return the port that an environment variable names. Raises LocalStackError when it names none."""
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise LocalStackError(f"{variable} must be a number from 1 to 65535.")
    return int(text)
