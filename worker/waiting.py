"""Bounded waits, and the growing pauses of a role during an outage."""

import asyncio
import random

import structlog

from service.telemetry import logs

_SHORTEST_SECONDS = 0.05
_LONGEST_SECONDS = 1.0  # So a role resumes within a second after an outage. A try per second is little load.

_log = structlog.get_logger()


class Pauses:
    """The pauses of a role while a dependency is unavailable. They double, by default up to a second."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._seconds = _SHORTEST_SECONDS

    def reset(self) -> None:
        """Start again with the shortest pause, after a success."""
        self._seconds = _SHORTEST_SECONDS

    async def log_and_wait(self, error: Exception, stop: asyncio.Event) -> None:
        """Log an outage, and pause, but not after *stop*."""
        await wait_at_most(self.log(error), stop)

    def log(self, error: Exception, *, longest: float = _LONGEST_SECONDS, **facts: int | str) -> float:
        """Log an outage with *facts*. Return the seconds to pause: more each time, up to *longest*."""
        seconds = min(self._seconds, longest) * random.uniform(0.5, 1.0)  # noqa: S311 - spreads replicas
        self._seconds = max(self._seconds, min(2 * self._seconds, longest))
        _log.warning(self._event, pause_seconds=round(seconds, 2), error=logs.summarize(error), **facts)
        return seconds


async def wait_at_most(seconds: float | None, *events: asyncio.Event) -> None:
    """Wait until one of *events* is set or *seconds* have passed. None means no limit."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
