"""`/livez`, `/readyz` and `/metrics`. service/app.py and worker/process.py list what /readyz checks."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from http import HTTPStatus
from typing import TypeAlias

import msgspec
from prometheus_client import generate_latest

from service.postgres import schema
from service.postgres.outages import PostgresUnavailable, is_rejected_login
from service.postgres.pool import Pool
from service.postgres.schema import SchemaOutdated, UnfitSetting
from service.server import http_server
from service.server.asgi import Receive, Response, Scope, Send
from service.server.background import in_background
from service.server.http_server import Address
from service.server.limits import MOST_PROBE_CONNECTIONS

# Raises an error if the process cannot work. Returns a warning if it can work but something is wrong.
Check: TypeAlias = Callable[[], Awaitable[str | None]]
Checks: TypeAlias = Mapping[str, Check]
ReadGauges: TypeAlias = Callable[[], Awaitable[None]]

_REJECTED_LOGIN = "Postgres rejects the login."


class NotReady(Exception):
    """The process lacks something that it needs for its work."""


def lasting_readiness(pool: Pool, *, seconds: float) -> Check:
    """Return a check that runs `check_ready` until it has passed, and again once the pool has connected.

    A new connection may lead to another Postgres. But once `check_ready` has passed, an unreachable Postgres,
    or a setting that was changed, no longer fails the returned check: otherwise no API process would be
    ready, and callers would get the ingress's error instead of our 503. A rejected login or an outdated
    schema still fails it, because other processes may not have this fault.
    """
    has_passed, opened = False, 0  # *opened*: how many connections the pool had opened by then
    warning: str | None = None

    async def run() -> str | None:
        nonlocal has_passed, opened, warning
        if has_passed and pool.opened and pool.opened_count == opened:
            return _REJECTED_LOGIN if pool.is_login_rejected else warning
        try:
            warning = await schema.check_ready(pool, seconds=seconds)
        except PostgresUnavailable as error:
            if pool.is_login_rejected and not pool.opened:
                has_passed = False
            if not has_passed:
                raise
            return _state(error)
        except UnfitSetting as error:
            if not has_passed:
                raise
            warning = str(error)
        has_passed, opened = True, pool.opened_count
        return warning

    return run


async def _answer(path: str, checks: Checks, read_gauges: ReadGauges | None) -> Response:
    match path:
        case "/livez":
            return _in_json(HTTPStatus.OK, {"status": "alive"})
        case "/readyz" if not checks:
            return _in_json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "starting or stopping"})
        case "/readyz":
            results = {name: await _result(check) for name, check in checks.items()}
            is_ready = all(passed for passed, _ in results.values())
            status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
            return _in_json(status, {name: state for name, (_, state) in results.items()})
        case "/metrics":
            if read_gauges is not None:
                await read_gauges()
            return Response.of(HTTPStatus.OK, b"text/plain; version=0.0.4; charset=utf-8", generate_latest())
    return _in_json(HTTPStatus.NOT_FOUND, {"status": "not found"})


def _in_json(status: HTTPStatus, body: dict[str, str]) -> Response:
    return Response.of(status, b"application/json", msgspec.json.encode(body))


async def _result(check: Check) -> tuple[bool, str]:
    """Return whether the process may get work, and the state that the check found."""
    try:
        return True, await check() or "ok"
    except (NotReady, PostgresUnavailable, SchemaOutdated) as error:
        return False, _state(error)


def _state(error: Exception) -> str:
    if is_rejected_login(error):
        return _REJECTED_LOGIN
    return (error.args and str(error)) or (error.__doc__ or "")


def serving(
    checks: Checks, address: Address, stop: asyncio.Event, read_gauges: ReadGauges | None = None
) -> AbstractAsyncContextManager[None]:
    """Serve probes while the block runs. The process is not ready without *checks*, or once *stop* is set."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # There is nothing to do at startup and shutdown.
            response = await _answer(scope["path"], {} if stop.is_set() else checks, read_gauges)
            await response(scope, receive, send)

    serve = partial(http_server.serve, app, address, asyncio.Event(), most_connections=MOST_PROBE_CONNECTIONS)
    return in_background("probes", serve)
