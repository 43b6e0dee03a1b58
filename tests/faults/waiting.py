"""Waits for what nobody announces, with a bound."""

import asyncio
import time
from collections.abc import Awaitable, Callable


async def until(
    check: Callable[[], bool | Awaitable[bool]], *, seconds: float, pause_seconds: float = 0.05
) -> bool:
    """Ask *check* again and again until it says yes; False when it has not after *seconds*."""
    deadline = time.monotonic() + seconds
    while True:
        answer = check()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return True
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(pause_seconds)
