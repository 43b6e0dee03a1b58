"""The outermost layer of the API: X-Request-Id on every response, HEAD, each request logged and counted."""

import asyncio
import re
import time

import structlog
import uuid_utils
from litestar.enums import HttpMethod, ScopeType
from litestar.types import ASGIApp, HTTPResponseStartEvent, Message, Receive, Scope, Send

from service.api.envelope import Answer
from service.server import probes
from service.server.refusals import Refusal
from service.telemetry import api_metrics

_WELL_FORMED = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
PROBES = probes.PATHS

_log = structlog.get_logger()


class AccessLog:
    """Wraps the application, router and all: Litestar's own middleware never sees its 404 and 405."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        asked = scope
        if method == HttpMethod.HEAD:
            # The same as GET. The server leaves out the body: it goes by the scope that it has made.
            asked = {**scope, "method": HttpMethod.GET}
        started_at = time.perf_counter()
        request_id = _inbound_id(scope) or new_request_id()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = _with_headers(message, request_id)
            await send(message)

        bound = structlog.contextvars.bind_contextvars(request_id=request_id.decode())
        api_metrics.requests_in_progress.inc()
        try:
            await self._app(asked, receive, send_with_id)
        except asyncio.CancelledError:
            if status:
                raise
            # Only the server cancels, last of all, and its task ends here: the exception has nowhere to go.
            await Answer.cut_off()(asked, receive, send_with_id)
        finally:
            duration = time.perf_counter() - started_at
            if route := asked.get("path_template"):
                scope["path_template"] = route  # for the span
            api_metrics.requests_in_progress.dec()
            try:
                record(method, route, status, duration)
            finally:
                structlog.contextvars.reset_contextvars(**bound)


def _inbound_id(scope: Scope) -> bytes | None:
    """Return the caller's X-Request-Id when it is harmless to repeat."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _WELL_FORMED.fullmatch(value):
            return value
    return None


def new_request_id() -> bytes:
    """Return the X-Request-Id of a request that came without."""
    return uuid_utils.uuid4().hex.encode()


def _with_headers(message: HTTPResponseStartEvent, request_id: bytes) -> HTTPResponseStartEvent:
    """Add X-Request-Id, HEAD to the methods allowed, and no-store unless something else is said."""
    headers = [
        (name, value + b", HEAD" if name.lower() == b"allow" and b"GET" in value else value)
        for name, value in message["headers"]
    ]
    headers.append((b"x-request-id", request_id))
    if not any(name.lower() == b"cache-control" for name, _ in headers):
        headers.append((b"cache-control", b"no-store"))
    return {**message, "headers": headers}


def refuse(refusal: Refusal) -> ASGIApp:
    """Return the answer to a request that the server could not read; it is logged and counted like others."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request_id = new_request_id()
        await Answer.refusing(refusal, (b"x-request-id", request_id))(scope, receive, send)
        with structlog.contextvars.bound_contextvars(request_id=request_id.decode()):
            record(None, None, int(refusal.status), 0.0)

    return answer


def record(method: str | None, route: str | None, status: int, duration: float) -> None:
    """Count and log a request by its route's template.

    Never by the path or query as sent: both may hold what nobody should read. What the router answers itself,
    with 404 or 405, has no route.
    """
    route = route or "unmatched"
    api_metrics.observe_request(method=str(method), route=route, status=status, seconds=duration)
    log = _log.debug if route in PROBES and status < 500 else _log.info
    log(
        "request_served",
        method=method,
        route=route,
        status=status,
        duration_ms=round(duration * 1000, 2),
    )
