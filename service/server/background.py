"""Background work: restarted when it fails, cancelled when the block around it ends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

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
    task = asyncio.current_task()
    while True:
        try:
            await work()
        except (Exception, asyncio.CancelledError) as error:  # No error may stop the work permanently.
            is_ending = task is not None and task.cancelling() > 0
            if is_ending and isinstance(error, asyncio.CancelledError):
                raise
            failures.inc()
            _log.error("background_work_failed", work=name, **logs.describe(error))
            if is_ending:
                return
        else:
            return
        await asyncio.sleep(_PAUSE_SECONDS)
