"""`/livez` and `/readyz`, for the API and for the worker."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import uvicorn
from litestar import Litestar, Request, Response, get
from litestar.datastructures import State

from service.postgres import PostgresUnavailable, SchemaOutdated

Checks = Mapping[str, Callable[[], Awaitable[None]]]


class NotReady(Exception):
    """Something this process needs for its work is missing."""


@get("/livez", include_in_schema=False)
async def livez() -> dict[str, str]:
    """Say that the process answers. Depends on nothing else."""
    return {"status": "alive"}


@get("/readyz", include_in_schema=False)
async def readyz(request: Request[Any, Any, State]) -> Response[dict[str, str]]:
    """Run every check in the application's state."""
    checks: Checks = request.app.state.checks
    results = {name: await _result(check) for name, check in checks.items()}
    ready = all(result == "ok" for result in results.values())
    return Response(results, status_code=HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)


async def _result(check: Callable[[], Awaitable[None]]) -> str:
    try:
        await check()
    except (NotReady, PostgresUnavailable, SchemaOutdated) as error:
        return (error.args and str(error)) or (error.__doc__ or "")
    return "ok"


async def serve(checks: Checks, *, host: str, port: int, stop: asyncio.Event) -> None:
    """Serve the probes of a process without an API until *stop*."""
    app = Litestar([livez, readyz], state=State({"checks": checks}), openapi_config=None, logging_config=None)
    config = uvicorn.Config(
        app, host=host, port=port, access_log=False, log_config=None, lifespan="off", server_header=False
    )
    server = _ProbeServer(config)
    serving = asyncio.create_task(server.serve())
    try:
        await stop.wait()
    finally:
        server.should_exit = True
        await serving


class _ProbeServer(uvicorn.Server):
    """A server that leaves the signals to the process it is part of."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
