"""`/livez`, `/readyz` and `/metrics`, for the API and for the worker."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import asyncpg
from litestar import Litestar, Request, Response, get
from litestar.datastructures import State
from prometheus_client import REGISTRY

from service.postgres.outages import PostgresUnavailable
from service.postgres.schema import SchemaOutdated
from service.server import http_server
from service.telemetry import metrics

Check = Callable[[], Awaitable[None]]
Checks = Mapping[str, Check]
ReadGauges = Callable[[], Awaitable[None]]


class NotReady(Exception):
    """Something this process needs for its work is missing."""


class Impaired(Exception):
    """Something is missing that is no reason to be given no work."""


def lasting(check: Check) -> Check:
    """Return a check of Postgres that, once passed, fails no more because Postgres is away.

    It is away for every API alike: were none ready, callers would get the answer of the ingress instead of
    our 503. A login that is refused, or too old a schema, may be this process's own: that still fails, and
    after a refused login so does an absence, until the check passes again.
    A worker has no callers to lose: its readiness says whether it can work now.
    """
    has_passed = False

    async def run() -> None:
        nonlocal has_passed
        try:
            await check()
        except PostgresUnavailable as error:
            has_passed = has_passed and not _refuses_login(error)
            if has_passed:
                raise Impaired(_state(error)) from error
            raise
        has_passed = True

    return run


@get("/livez", include_in_schema=False)
async def livez() -> dict[str, str]:
    """Say that the process answers. Depends on nothing else."""
    return {"status": "alive"}


@get("/readyz", include_in_schema=False)
async def readyz(request: Request[Any, Any, State]) -> Response[dict[str, str]]:
    """Run every check in the application's state, and name the state of each."""
    checks: Checks = request.app.state.checks
    results = {name: await _result(check) for name, check in checks.items()}
    is_ready = all(passed for passed, _ in results.values())
    return Response(
        {name: state for name, (_, state) in results.items()},
        status_code=HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE,
    )


@get("/metrics", include_in_schema=False)
async def show_metrics(request: Request[Any, Any, State]) -> Response[bytes]:
    """Show Prometheus every metric; gauges that are read elsewhere are read first, within a bound."""
    read_gauges: ReadGauges = request.app.state.read_gauges
    await read_gauges()
    return Response(metrics.exposition(request.app.state.registries), media_type=metrics.CONTENT_TYPE)


async def _result(check: Check) -> tuple[bool, str]:
    try:
        await check()
    except Impaired as error:
        return True, str(error)
    except (NotReady, PostgresUnavailable, SchemaOutdated) as error:
        return False, _state(error)
    return True, "ok"


def _state(error: Exception) -> str:
    if _refuses_login(error):
        return "Postgres refuses the login."
    return (error.args and str(error)) or (error.__doc__ or "")


def _refuses_login(error: Exception) -> bool:
    return isinstance(error.__cause__, asyncpg.InvalidAuthorizationSpecificationError)


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
