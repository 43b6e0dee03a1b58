"""The terminal: lines to its user, and the signals that ask for the end."""

import os
import signal
import sys
from contextlib import suppress

from deploy.local.errors import LocalStackError


class Terminal:
    """Prints lines, and notes SIGINT, SIGTERM and SIGHUP."""

    def __init__(self) -> None:
        self._stopping = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def stopping(self) -> bool:
        """Return whether a signal has asked for the end."""
        return self._stopping

    def report(self, line: str) -> None:
        """Print a line now. A closed terminal is ignored."""
        with suppress(OSError):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


def port_from(variable: str, *, default: int) -> int:
    """Return the port in an environment variable. Raises LocalStackError if it is not a port."""
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise LocalStackError(f"{variable} must be a number from 1 to 65535.")
    return int(text)
