"""Work that goes on beside the requests for as long as a resource is open."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog

from service.telemetry import logs, metrics

PAUSE_SECONDS = 1.0  # after a failure

_log = structlog.get_logger()


@asynccontextmanager
async def in_background(name: str, work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run *work* until the block is left. A failure is logged and counted; after a pause it begins again."""
    task = asyncio.create_task(keep_running(name, work))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])  # Not the task itself, whose cancellation would look like ours.


async def keep_running(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run *work* to its end, begun again after a pause whenever it fails."""
    failures = metrics.background_failures.labels(name)
    task = asyncio.current_task()
    while True:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - an unforeseen error must not end the work for good
            failures.inc()
            _log.error("background_work_failed", work=name, **logs.describe(error))
            if task is not None and task.cancelling():
                return
        else:
            return
        await asyncio.sleep(PAUSE_SECONDS)
