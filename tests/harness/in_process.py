"""The API, and parts of the worker, run in the test's own process and event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
from litestar.types import ASGIApp
from msgspec.structs import replace
from structlog.typing import EventDict

from deploy.local.machine.ports import accepts, free_port
from service.api.outer_layer import OuterLayer
from service.app import create_app
from service.server import http_server, probes
from service.settings import ServiceSettings
from tests.harness.http import NO_TLS, bearer, check_errors
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
