"""The signals that end a process."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from service.server.http_server import stop_on_signals

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def restored_handlers() -> Iterator[None]:
    """Restore the handlers of this process after the test."""
    before = [signal.getsignal(number) for number in _SIGNALS]
    yield
    for number, handler in zip(_SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("restored_handlers")
@pytest.mark.parametrize("number", _SIGNALS)
async def test_signal_asks_the_process_to_stop(number: signal.Signals) -> None:
    stop = stop_on_signals()
    try:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        async with asyncio.timeout(30):
            await stop.wait()
    finally:
        for each in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(each)
