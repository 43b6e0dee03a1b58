"""ASGI: its types, and a response that is an application."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeAlias

# Both are dictionaries. Every framework types their keys in its own way; Any is compatible with all of them.
Scope: TypeAlias = Any
Message: TypeAlias = Any

Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Header: TypeAlias = tuple[bytes, bytes]  # the name in lower case, and the value

PLAIN_TEXT: Header = (b"content-type", b"text/plain; charset=utf-8")


class Response:
    """A response without a framework, for the probes."""

    def __init__(self, status: HTTPStatus, body: bytes, *headers: Header) -> None:
        self._status = int(status)
        self._body = body
        self._headers = headers

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send it."""
        length = (b"content-length", b"%d" % len(self._body))
        headers = [*self._headers, length] if self._status != HTTPStatus.NO_CONTENT else [*self._headers]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})
