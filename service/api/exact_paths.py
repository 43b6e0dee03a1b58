"""Serves each path under one spelling: the router also takes `//metrics` and `/%6detrics` for `/metrics`."""

from collections.abc import Awaitable

from litestar.enums import ScopeType
from litestar.exceptions import NotFoundException
from litestar.types import ASGIApp, Receive, Scope, Send

from service.api import errors


class ExactPaths:
    """Wraps the router, so that no other spelling of a path gets around a gateway's rules for it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one ASGI connection."""
        if scope["type"] != ScopeType.HTTP:
            return self._app(scope, receive, send)
        path = scope["raw_path"]
        if b"//" in path or (path.endswith(b"/") and path != b"/"):
            return errors.answer(NotFoundException())(scope, receive, send)
        if b"%" in path:
            scope["path"] = path.decode("ascii")  # Not decoded, so it matches no route: none needs encoding.
        return self._app(scope, receive, send)
