"""Background work: a failure is logged, and stops neither the work nor anything else."""

import asyncio

import pytest
from structlog.testing import capture_logs

from service.server import background
from service.server.background import in_background
from tests.harness.metrics import rises
from tests.harness.waiting import eventually


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch):
    """Restart work at once."""
    monkeypatch.setattr(background, "_PAUSE_SECONDS", 0.01)


@pytest.mark.parametrize("error", [LookupError, asyncio.CancelledError])  # aiormq cancels to close a channel
async def test_failed_work_is_logged_counted_and_restarted(error):
    begun = 0

    async def fail_twice() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise error("a secret")
        await asyncio.Event().wait()

    with capture_logs() as logs, rises("background_failures_total", by=2, work="test"):
        async with in_background("test", fail_twice):
            await eventually(lambda: begun == 3)

    failed = ("background_work_failed", "test", error.__name__)
    assert [(line["event"], line["work"], line["error"]) for line in logs] == [failed] * 2
    assert "a secret" not in str(logs)
