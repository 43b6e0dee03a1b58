"""The outermost layer of the API: every response has an X-Request-Id; every request is logged and counted."""

import re
import time
from uuid import uuid4

import structlog
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPResponseStartEvent, Message, Receive, Scope, Send

from service import api_metrics

_WELL_FORMED = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PROBES = frozenset({"/livez", "/readyz", "/metrics"})

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
        started_at = time.perf_counter()
        request_id = _inbound_id(scope) or uuid4().hex.encode()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = _with_id(message, request_id)
            await send(message)

        with (
            structlog.contextvars.bound_contextvars(request_id=request_id.decode()),
            api_metrics.requests_in_progress.track_inprogress(),
        ):
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                duration = time.perf_counter() - started_at
                _record(scope, status, duration)


def _inbound_id(scope: Scope) -> bytes | None:
    """Return the caller's X-Request-Id when it is harmless to repeat."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _WELL_FORMED.fullmatch(value):
            return value
    return None


def _with_id(message: HTTPResponseStartEvent, request_id: bytes) -> HTTPResponseStartEvent:
    return {**message, "headers": [*message["headers"], (b"x-request-id", request_id)]}


def _record(scope: Scope, status: int, duration: float) -> None:
    """Count and log a request by its route's template.

    Never by the path or query as sent: both may hold what nobody should read. What the router answers itself,
    with 404 or 405, has no route.
    """
    route = scope.get("path_template") or "unmatched"
    method = str(scope.get("method"))
    api_metrics.observe_request(method=method, route=route, status=status, seconds=duration)
    log = _log.debug if route in _PROBES and status < 500 else _log.info
    log(
        "request_served",
        method=method,
        route=route,
        status=status,
        duration_ms=round(duration * 1000, 2),
    )
