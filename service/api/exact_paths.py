"""One spelling for each path: the router alone would serve `//metrics` and `/%6detrics` as `/metrics`."""

from collections.abc import Awaitable
from http import HTTPStatus

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from service.api.envelope import Answer


class ExactPaths:
    """Wraps the router, so that no other spelling passes a gateway's rules for a path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one ASGI connection."""
        if scope["type"] != ScopeType.HTTP:
            return self._app(scope, receive, send)
        path = scope["raw_path"]
        if b"//" in path or (path.endswith(b"/") and path != b"/"):
            missing = HTTPStatus.NOT_FOUND
            return Answer.failed(missing, "not_found", f"{missing.phrase}.")(scope, receive, send)
        if b"%" in path:
            scope["path"] = path.decode("ascii")  # as it was sent: no path of ours needs an encoding
        return self._app(scope, receive, send)
