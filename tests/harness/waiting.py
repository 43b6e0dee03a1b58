"""Polling with a bound, for conditions that send no notification."""

import asyncio
import time
from collections.abc import Callable
from inspect import isawaitable
from typing import Any


async def until(check: Callable[[], Any], *, seconds: float, pause_seconds: float = 0.05) -> bool:
    """Poll *check*, or the coroutine it returns, until the result is true. False after *seconds*."""
    return bool(await _poll(check, seconds, pause_seconds))


async def eventually(check: Callable[[], Any], *, seconds: float = 60.0) -> Any:
    """Poll *check*, or the coroutine it returns, and return its first true result. Fail after *seconds*."""
    result = await _poll(check, seconds, 0.02)
    assert result, f"{result!r} even after {seconds:.0f} s"
    return result


async def _poll(check: Callable[[], Any], seconds: float, longest_pause: float) -> Any:
    """Poll with pauses that grow with the time passed, so that long waits take little processor time."""
    began = time.monotonic()
    while True:
        result = check()
        if isawaitable(result):
            result = await result
        elapsed = time.monotonic() - began
        if result or elapsed >= seconds:
            return result
        await asyncio.sleep(min(longest_pause, 0.002 + elapsed / 10))
