"""Background work: restarted when it fails, cancelled when the block around it ends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import structlog

from service.telemetry import logs, metrics

_PAUSE_SECONDS = 1.0  # between a failure and the restart

_log = structlog.get_logger()


@asynccontextmanager
async def in_background(name: str, work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run *work* while the block runs. A failure is logged and counted; the work restarts after a pause."""
    task = asyncio.create_task(keep_running(name, work))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])  # Not `await task`, which would raise its cancellation as if it were ours.


async def keep_running(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run *work* until it returns; restart it after a pause whenever it fails.

    aiormq may raise a CancelledError itself. That is a failure, too, unless this task is being cancelled.
    """
    failures = metrics.background_failures.labels(name)
    task = cast("asyncio.Task[None]", asyncio.current_task())
    while True:
        try:
            await work()
        except (Exception, asyncio.CancelledError) as error:  # No error may stop the work permanently.
            if task.cancelling() and isinstance(error, asyncio.CancelledError):
                raise
            failures.inc()
            _log.error("background_work_failed", work=name, **logs.describe(error))
            if task.cancelling():
                return
        else:
            return
        await asyncio.sleep(_PAUSE_SECONDS)
