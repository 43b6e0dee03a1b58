"""The span of an HTTP request: the layer around even the access log, used only when traces are exported."""

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from service.server import probes
from service.telemetry import api_metrics, tracing


class TracedRequests:
    """Wraps the application and its router. Probes are not traced."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != ScopeType.HTTP or scope["path"] in probes.PATHS:
            await self._app(scope, receive, send)
            return
        status = 500  # which the server sends when the application sends nothing

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
            await send(message)

        is_standard = scope["method"] in api_metrics.METHODS
        method, name = (scope["method"],) * 2 if is_standard else ("_OTHER", "HTTP")
        with tracing.span(
            name,
            "server",
            # No `url.path`, which the conventions ask for: a path may hold anything.
            lambda: {"http.request.method": method, "url.scheme": scope["scheme"]},
            parent=tracing.find(scope["headers"]),
        ):
            await self._app(scope, receive, send_noting_status)
            route = scope.get("path_template")
            tracing.describe(
                ({"http.route": route} if route else {})
                | {"http.response.status_code": status}
                | ({"error.type": str(status)} if status >= 500 else {}),
                name=f"{name} {route}" if route else name,
                failed=status >= 500,
            )
