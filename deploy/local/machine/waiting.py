"""Waits with a bound, which end at once when the user asks for the end."""

import time
from collections.abc import Callable

from deploy.local.errors import Interrupted

_end_asked_for = False


def interrupt(*_: object) -> None:
    """End every wait. Only a flag is set: a signal may arrive while a process is being started."""
    global _end_asked_for  # noqa: PLW0603 - signals are sent to the whole process
    _end_asked_for = True


def is_interrupted() -> bool:
    """Return whether the user has asked for the end."""
    return _end_asked_for


def wait_until(condition: Callable[[], bool], *, seconds: float, pause_seconds: float = 0.02) -> bool:
    """Return whether *condition* came true in time. Raises Interrupted."""
    deadline = time.monotonic() + seconds
    while not condition():
        if is_interrupted():
            raise Interrupted
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_seconds)
    return True


def trouble_before(
    condition: Callable[[], bool], trouble: Callable[[], str | None], *, seconds: float
) -> str | None:
    """Wait until *condition* is true. Return what happened instead, or None. Raises Interrupted."""
    in_time = wait_until(lambda: condition() or trouble() is not None, seconds=seconds, pause_seconds=0.05)
    return trouble() or (None if in_time else "It does not answer.")
