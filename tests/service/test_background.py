"""Work in the background: its failure is told, and harms nothing else."""

import asyncio

from structlog.testing import capture_logs

from service.background import in_background
from tests.conftest import eventually


async def test_failure_in_the_background_is_logged_and_ends_nothing() -> None:
    async def fail() -> None:
        raise LookupError("a secret")

    with capture_logs() as logs:
        async with in_background(fail()):
            await eventually(lambda: logs)

    assert logs[0]["event"] == "background_work_failed"
    assert logs[0]["error"] == "LookupError"
    assert "a secret" not in str(logs)


async def test_work_in_the_background_ends_with_the_block() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with in_background(work()):
        await asyncio.sleep(0)

    assert ended.is_set()
