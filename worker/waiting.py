"""Waiting: for work, for the end of an outage, and always with a bound."""

import asyncio
import random
from contextlib import suppress

import structlog

from service.telemetry import logs

_log = structlog.get_logger()


class Pauses:
    """The growing pauses of one role while something it depends on is away."""

    def __init__(self, event: str, *, longest_seconds: float, shortest_seconds: float = 0.05) -> None:
        self._event = event
        self._longest_seconds = longest_seconds
        self._shortest_seconds = shortest_seconds
        self._failures = 0

    def reset(self) -> None:
        """Say that work has succeeded again."""
        self._failures = 0

    async def after(self, error: Exception, stop: asyncio.Event) -> None:
        """Log an outage and pause, longer each time, but no longer than until *stop*."""
        seconds = min(self._longest_seconds, self._shortest_seconds * 2 ** min(self._failures, 20))
        seconds *= random.uniform(0.5, 1.0)  # noqa: S311 - spreads the replicas, keeps no secret
        self._failures += 1
        _log.warning(self._event, pause_seconds=round(seconds, 2), error=logs.summarize(error))
        await rest(seconds, stop)


async def rest(seconds: float, *events: asyncio.Event) -> None:
    """Wait until one of *events* is set, at most *seconds*."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await first_of(*events)


async def first_of(*events: asyncio.Event) -> None:
    """Wait until one of *events* is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
