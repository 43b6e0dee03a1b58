"""The API, parts of the worker, and commands of both, run in the test's own process."""

import asyncio
import gc
import io
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from typing import Any, TextIO
from unittest.mock import patch

import httpx
import structlog
from litestar.types import ASGIApp
from msgspec.structs import replace
from structlog.typing import EventDict

import service.__main__
import worker.__main__
from deploy.local.machine.ports import accepts, free_port
from service.api.outer_layer import OuterLayer
from service.app import create_app
from service.server import http_server, probes
from service.settings import ServiceSettings
from tests.harness.http import NO_TLS, bearer, check_errors
from tests.harness.processes import Ended
from tests.harness.waiting import eventually
from worker import process
from worker.settings import WorkerSettings


@asynccontextmanager
async def serve(app: ASGIApp, *, shutdown_seconds: float = 5.0, **options: Any) -> AsyncIterator[str]:
    """Serve *app* on a free port of the loopback; yields its base URL."""
    stop = asyncio.Event()
    async with serving(app, stop, shutdown_seconds=shutdown_seconds, **options) as (base_url, task):
        yield base_url
        stop.set()
        await task


@asynccontextmanager
async def serving(
    app: ASGIApp, stop: asyncio.Event, **options: Any
) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """Serve *app* on a free port until *stop*; yields its base URL and the task that serves it."""
    port = free_port()
    task = asyncio.create_task(http_server.serve(app, ("127.0.0.1", port), stop, **options))
    await eventually(lambda: accepts(port) or task.done())
    yield f"http://127.0.0.1:{port}", task


def served(logs: Sequence[EventDict]) -> list[EventDict]:
    return [line for line in logs if line["event"] == "request_served"]


@asynccontextmanager
async def api_client(
    settings: ServiceSettings, token: str | None, *, app: Any = None, **changes: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve an API with *settings* and *changes* to them; yields a client of it that sends *token*."""
    settings = replace(settings, **changes)
    served_app = OuterLayer(app or create_app(settings))
    headers = bearer(token) if token else {}
    async with (
        serve(served_app, keep_alive_seconds=settings.keep_alive_seconds) as base_url,
        httpx.AsyncClient(base_url=base_url, headers=headers, timeout=20.0, verify=NO_TLS) as client,
    ):
        client.event_hooks["response"].append(check_errors)
        yield client


@asynccontextmanager
async def api_and_probes(
    settings: ServiceSettings, token: str | None, **changes: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Serve an API as `api_client` does, and its probes; yields a client of each."""
    app, port = create_app(replace(settings, **changes)), free_port()
    async with (
        api_client(settings, token, app=app, **changes) as client,
        probes.serving(app.state.checks, ("127.0.0.1", port), asyncio.Event()),
        _prober(port) as prober,
    ):
        yield client, prober


@asynccontextmanager
async def _prober(port: int) -> AsyncIterator[httpx.AsyncClient]:
    base_url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=base_url, timeout=20.0, verify=NO_TLS) as prober:
        await eventually(lambda: accepts(port))
        yield prober


@asynccontextmanager
async def worker_probes(settings: WorkerSettings, *roles: str) -> AsyncIterator[httpx.AsyncClient]:
    """Run a worker with *roles*, or with all; yields a client of its probes."""
    # A worker that takes longer than this to stop ends its process, which is the test's.
    settings, port = replace(settings, shutdown_seconds=86_400.0), free_port()
    worker = partial(process.run, dict.fromkeys(roles or process.ROLES, settings), ("127.0.0.1", port))
    async with running(worker), _prober(port) as client:
        yield client


@asynccontextmanager
async def running(*parts: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run parts of the worker until the block is left, and let them stop in order."""
    stop = asyncio.Event()
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(part(stop))
        try:
            yield
        finally:
            stop.set()


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
        status = {"service": service.__main__.main, "worker": worker.__main__.main}[program](words)
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
