"""Waits with a bound, which end at once when the user asks for the end."""

import time
from collections.abc import Callable

from deploy.local.errors import Interrupted

# Returns whether the end was asked for. Not an Event: a signal handler may set a plain flag, but must not
# take the lock inside an Event, which the thread it interrupts may hold.
Stopping = Callable[[], bool]


def never() -> bool:
    """Return False: the end is never asked for."""
    return False


def wait_until(
    condition: Callable[[], bool], *, seconds: float, stopping: Stopping = never, pause_seconds: float = 0.02
) -> bool:
    """Return whether *condition* came true in time. Raises Interrupted if *stopping* did first."""
    deadline = time.monotonic() + seconds
    while not condition():
        if stopping():
            raise Interrupted
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_seconds)
    return True
