"""Waits that end in time, and at once when the end is asked for."""

import time
from collections.abc import Callable

from deploy.local.errors import Interrupted

# Whether the end was asked for. Asking, not an event: a signal handler may set a plain flag, but must not
# take the lock inside an event that the thread it interrupts may hold.
Stopping = Callable[[], bool]


def never() -> bool:
    """Go on: nobody asks for the end."""
    return False


def wait_until(
    condition: Callable[[], bool], *, seconds: float, stopping: Stopping = never, pause_seconds: float = 0.02
) -> bool:
    """Return whether *condition* came true in time. Raises Interrupted when the end was asked for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if stopping():
            raise Interrupted
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_seconds)
    return True
