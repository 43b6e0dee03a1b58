"""Waits with a bound, and the growing pauses of a role during an outage."""

import asyncio
import random
from contextlib import suppress

import structlog

from service.telemetry import logs

_log = structlog.get_logger()


class Pauses:
    """The pauses of a role while a dependency is unavailable: each twice as long as the one before."""

    def __init__(self, event: str, *, longest_seconds: float, shortest_seconds: float = 0.05) -> None:
        self._event = event
        self._longest_seconds = longest_seconds
        self._shortest_seconds = shortest_seconds
        self._failures = 0

    def reset(self) -> None:
        """Begin with the shortest pause again, after a success."""
        self._failures = 0

    async def log_and_wait(self, error: Exception, stop: asyncio.Event, **facts: int) -> None:
        """Log the outage and *facts* as a warning, then wait for the next pause or until *stop*."""
        seconds = min(self._longest_seconds, self._shortest_seconds * 2 ** min(self._failures, 20))
        seconds *= random.uniform(0.5, 1.0)  # noqa: S311 - spreads the replicas, keeps no secret
        self._failures += 1
        _log.warning(self._event, pause_seconds=round(seconds, 2), error=logs.summarize(error), **facts)
        await wait_at_most(seconds, stop)


async def wait_at_most(seconds: float, *events: asyncio.Event) -> None:
    """Wait until one of *events* is set, or *seconds* have passed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wait_for_first(*events)


async def wait_for_first(*events: asyncio.Event) -> None:
    """Wait until one of *events* is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
