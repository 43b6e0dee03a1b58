"""`python -m service` and `python -m worker`, run in the test's own process."""

import asyncio
import gc
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO
from unittest.mock import patch

import structlog

import service.__main__
import worker.__main__
from tests.harness.processes import Ended

_PROGRAMS = {"service": service.__main__.main, "worker": worker.__main__.main}


async def run(*command: str, environment: Mapping[str, str]) -> Ended:
    """Run a command in a thread, so that servers in the test's event loop can answer it."""
    return await asyncio.to_thread(call, *command, environment=environment)


def call(*command: str, environment: Mapping[str, str]) -> Ended:
    """Run a command. Only in the main thread may it handle signals, as a worker does."""
    program, *words = command
    output, errors, thresholds = _Captured(sys.stdout), _Captured(sys.stderr), gc.get_threshold()
    with (
        patch.dict(os.environ, environment, clear=True),
        restored_logging(),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        status = _PROGRAMS[program](words)
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    return Ended(status, output.getvalue(), errors.getvalue())


class _Captured(io.StringIO):
    """What this thread writes. Servers in the test's event loop may log meanwhile, to *elsewhere*."""

    def __init__(self, elsewhere: TextIO) -> None:
        super().__init__()
        self._elsewhere = elsewhere
        self._thread_id = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread_id:
            return self._elsewhere.write(text)
        return super().write(text)


@contextmanager
def restored_logging() -> Iterator[None]:
    ours, root = structlog.get_config(), logging.getLogger()
    level, handlers, disabled = root.level, root.handlers[:], root.manager.disable
    try:
        yield
    finally:
        structlog.configure(**ours)
        logging.disable(disabled)
        root.setLevel(level)
        root.handlers[:] = handlers
