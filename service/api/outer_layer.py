"""The layer around the router: logs, counts and traces requests, and completes the response.

It is outside Litestar, because Litestar's own middleware never sees the router's 404 and 405.
"""

import asyncio
import re
import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import structlog
import uuid_utils
from litestar.enums import HttpMethod, ScopeType
from litestar.exceptions import ClientException, NotFoundException
from opentelemetry.trace import StatusCode

from service.api import errors
from service.api.errors import CLOSE, ApiError
from service.server.asgi import ASGIApp, Header, Message, Receive, Scope, Send, header_values
from service.server.limits import LONGEST_PATH
from service.telemetry import api_metrics, logs, tracing

_REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # an id that is safe to echo
_HOST = re.compile(r"([\w.-]+|\[[\w.:%]+\])(:[0-9]*)?", re.ASCII)  # a name or address, and a port

_log = structlog.get_logger()


class OuterLayer:
    """Wraps the application and its router."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
        elif tracing.is_on():
            await self._trace(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _trace(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_standard = scope["method"] in api_metrics.METHODS
        method, name = (scope["method"],) * 2 if is_standard else ("_OTHER", "HTTP")
        with tracing.span(
            name,
            "server",
            # OpenTelemetry's conventions ask for `url.path`, too, but a path may contain anything.
            lambda: {"http.request.method": method, "url.scheme": scope["scheme"]},
            parent=tracing.find(scope["headers"]),
        ) as span:
            route, status = await self._serve(scope, receive, send)
            status = status or 500  # Granian sends 500 if the application sends nothing
            span.set_attribute("http.response.status_code", status)
            if route:
                span.set_attribute("http.route", route)
                span.update_name(f"{name} {route}")
            if status >= 500:
                span.set_attribute("error.type", str(status))
                span.set_status(StatusCode.ERROR)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> tuple[str | None, int]:
        """Serve, count and log an HTTP request. Return its route or None, and the status sent or 0."""
        started_at = time.perf_counter()
        method = scope["method"]
        if method == HttpMethod.HEAD:
            # Served as GET. hyper drops the body, because it knows the method that was sent.
            scope = {**scope, "method": HttpMethod.GET}
        request_id = _request_id(scope["headers"])
        traceparent = tracing.onward(tracing.find(scope["headers"]))
        scope["state"]["traceparent"] = traceparent
        status = 0

        async def send_completed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
                message = _complete(message, request_id)
            await send(message)

        # The server serves each request in a task of its own, so nothing needs to be unbound.
        structlog.contextvars.bind_contextvars(
            http_request_id=request_id.decode(), **logs.about(None, traceparent)
        )
        api_metrics.requests_in_progress.inc()
        try:
            _check_head(scope)
            await self._app(scope, receive, send_completed)
        except (ApiError, ClientException, asyncio.CancelledError) as refusal:
            if status:
                raise
            # Only the server cancels a request, at the end of its shutdown. The task ends here, so the
            # exception need not be raised again.
            await errors.refuse(scope, refusal).to_asgi_response()(scope, receive, send_completed)
        finally:
            api_metrics.requests_in_progress.dec()
            route = scope.get("path_template")
            _record(method, route, status, time.perf_counter() - started_at, errors.describe(scope))
        return route, status


def _check_head(scope: Scope) -> None:
    """Raise ApiError or ClientException for a Host or Transfer-Encoding that gateways may read differently.

    hyper accepts them. Raise NotFoundException for a long path, because the router caches paths.
    """
    encodings = [value.lower() for value in header_values(scope, b"transfer-encoding")]
    if encodings not in ([], ["chunked"]):
        message = "The only Transfer-Encoding that is served is chunked, once."
        raise ApiError(HTTPStatus.NOT_IMPLEMENTED, "unsupported_transfer_encoding", message, CLOSE)
    hosts = header_values(scope, b"host")
    # RFC 9112, section 3.2. Without the header, Granian adds an empty one.
    is_left_out = hosts == [""] and scope["http_version"] != "1.1"
    if not is_left_out and (len(hosts) != 1 or not _HOST.fullmatch(hosts[0])):
        raise ClientException
    if len(scope["raw_path"]) > LONGEST_PATH:
        raise NotFoundException


def _request_id(headers: Iterable[Header]) -> bytes:
    """Return the caller's X-Request-Id if it is safe to echo, otherwise a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return uuid_utils.uuid4().hex.encode()


def _complete(message: Message, request_id: bytes) -> Message:
    """Add X-Request-Id. Add `no-store` if there is no Cache-Control, and HEAD to an Allow header with GET."""
    headers = [
        (name, value + b", HEAD" if name == b"allow" and b"GET" in value else value)
        for name, value in message["headers"]
    ]
    headers.append((b"x-request-id", request_id))
    if not any(name == b"cache-control" for name, _ in headers):
        headers.append((b"cache-control", b"no-store"))
    return {**message, "headers": headers}


def _record(method: str, route: str | None, status: int, seconds: float, facts: dict[str, Any]) -> None:
    """Count and log an HTTP request, without path, query and unknown method, which may hold personal data."""
    route = route or "unmatched"
    method = method if method in api_metrics.METHODS else "other"
    api_metrics.request_seconds.labels(method, route, str(status)).observe(seconds)
    _log.info(
        "request_served",
        method=method,
        route=route,
        status=status,
        duration_ms=round(seconds * 1000, 2),
        **facts,
    )
