"""Turns callers away while too many are waiting for Postgres, before anything is done for them."""

from http import HTTPStatus

from litestar import Litestar
from litestar.enums import ScopeType
from litestar.types import Receive, Scope, Send

from service import envelope
from service.postgres import Pool, PostgresUnavailable


class Admission:
    """Wraps the application: to read token and body, and then to refuse, costs nearly as much as to serve."""

    def __init__(self, app: Litestar) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection; the probes are always let in."""
        if scope["type"] == ScopeType.HTTP and scope["path"].startswith("/v1/") and self._pool.is_full:
            await _refuse(send)
        else:
            await self._app(scope, receive, send)

    @property
    def _pool(self) -> Pool:
        pool: Pool = self._app.state.resources.pool
        return pool


async def _refuse(send: Send) -> None:
    body = envelope.encode_failure(
        HTTPStatus.SERVICE_UNAVAILABLE, "unavailable", PostgresUnavailable.__doc__ or ""
    )
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"retry-after", b"%d" % envelope.RETRY_AFTER_SECONDS),
    ]
    await send({"type": "http.response.start", "status": HTTPStatus.SERVICE_UNAVAILABLE, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
