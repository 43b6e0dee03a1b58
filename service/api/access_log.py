"""The outermost layer but for tracing: logs and counts each request, completes its headers, serves HEAD."""

import asyncio
import time

import structlog
from litestar.enums import HttpMethod, ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from service.api import errors, response_headers
from service.server import log_facts, probes
from service.server.log_facts import LogFacts
from service.server.refusals import Refusal
from service.telemetry import api_metrics, logs, tracing

_log = structlog.get_logger()


class AccessLog:
    """Wraps the application and its router: Litestar's own middleware never sees the router's 404 and 405."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        routed = scope
        if method == HttpMethod.HEAD:
            # Served as GET. The server drops the body, because its own scope still says HEAD.
            routed = {**scope, "method": HttpMethod.GET}
        started_at = time.perf_counter()
        request_id = response_headers.x_request_id(scope)
        facts = log_facts.begin(scope, tracing.onward(tracing.find(scope["headers"])))
        status = 0

        async def send_completed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])  # not an enum: the console would show its name
                message = response_headers.complete(message, request_id)
            await send(message)

        bound = structlog.contextvars.bind_contextvars(
            request_id=request_id.decode(), **logs.about(None, facts.traceparent)
        )
        api_metrics.requests_in_progress.inc()
        try:
            await self._app(routed, receive, send_completed)
        except asyncio.CancelledError:
            if status:
                raise
            # Only the server cancels a request, at the end of its shutdown, and the task ends here: there
            # is nothing to pass the exception on to.
            await errors.answer(errors.shut_down())(routed, receive, send_completed)
        finally:
            duration = time.perf_counter() - started_at
            if route := routed.get("path_template"):
                scope["path_template"] = route  # for the span
                facts.uuid = facts.uuid or log_facts.uuid_in_path(routed)
            api_metrics.requests_in_progress.dec()
            try:
                record(method, route, status, duration, facts)
            finally:
                structlog.contextvars.reset_contextvars(**bound)


def refuse(refusal: Refusal) -> ASGIApp:
    """Return the answer to input that the server cannot read as a request. It is logged and counted too."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request_id = response_headers.new_x_request_id()
        facts = log_facts.begin(scope, tracing.onward(None))
        await errors.answer_refusal(refusal, (b"x-request-id", request_id))(scope, receive, send)
        with structlog.contextvars.bound_contextvars(request_id=request_id.decode()):
            record(None, None, int(refusal.status), 0.0, facts)

    return answer


def record(method: str | None, route: str | None, status: int, duration: float, facts: LogFacts) -> None:
    """Count and log a request under its route's template, "unmatched" where the router itself answered.

    The path and the query are not logged: both may hold personal data or secrets.
    """
    route = route or "unmatched"
    api_metrics.observe_request(method=str(method), route=route, status=status, seconds=duration)
    log = _log.debug if route in probes.PATHS and status < 500 else _log.info
    log(
        "request_served",
        method=method,
        route=route,
        status=status,
        duration_ms=round(duration * 1000, 2),
        **facts.describe(),
    )
