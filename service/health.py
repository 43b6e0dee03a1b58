"""`/livez`, `/readyz` and `/metrics`, for the API and for the worker."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from litestar import Litestar, Request, Response, get
from litestar.datastructures import State
from prometheus_client import REGISTRY

from service import http_server, metrics
from service.postgres import PostgresUnavailable
from service.schema import SchemaOutdated

Check = Callable[[], Awaitable[None]]
Checks = Mapping[str, Check]
ReadGauges = Callable[[], Awaitable[None]]


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


@get("/metrics", include_in_schema=False)
async def show_metrics(request: Request[Any, Any, State]) -> Response[bytes]:
    """Tell Prometheus every metric; what can only be read elsewhere is read first, within a bound."""
    read_gauges: ReadGauges = request.app.state.read_gauges
    await read_gauges()
    return Response(metrics.exposition(request.app.state.registries), media_type=metrics.CONTENT_TYPE)


async def _result(check: Check) -> str:
    try:
        await check()
    except (NotReady, PostgresUnavailable, SchemaOutdated) as error:
        return (error.args and str(error)) or (error.__doc__ or "")
    return "ok"


async def nothing_to_read() -> None:
    """Stand for the gauges of a process that has none to read."""


async def serve(
    checks: Checks, read_gauges: ReadGauges, listening: socket.socket, stop: asyncio.Event
) -> None:
    """Serve the probes and metrics of a process without an API until *stop*."""
    app = Litestar(
        [livez, readyz, show_metrics],
        state=State({"checks": checks, "read_gauges": read_gauges, "registries": [REGISTRY]}),
        openapi_config=None,
        logging_config=None,
    )
    await http_server.serve(app, listening, stop, shutdown_seconds=1.0)
