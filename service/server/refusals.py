"""What the HTTP server refuses by itself. The application words each answer, logs it and counts it."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Literal, TypeAlias

import msgspec

from service.server.asgi import PLAIN_TEXT, ASGIApp, Header, Response

LARGEST_HEAD = 64 * 1024  # bytes of the request line and the headers

Code: TypeAlias = Literal["malformed_request", "request_timeout", "head_too_large", "method_not_allowed"]


class Refusal(msgspec.Struct, frozen=True):
    """An answer that no handler is asked for."""

    status: HTTPStatus
    code: Code
    message: str
    headers: tuple[Header, ...] = ()


Refuse: TypeAlias = Callable[[Refusal], ASGIApp]

MALFORMED_REQUEST = Refusal(HTTPStatus.BAD_REQUEST, "malformed_request", "The request is not valid HTTP.")
HEAD_OVERDUE = Refusal(
    HTTPStatus.REQUEST_TIMEOUT, "request_timeout", "The request line and headers did not arrive in time."
)
HEAD_TOO_LARGE = Refusal(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "head_too_large",
    f"The request line and headers are larger than {LARGEST_HEAD // 1024} KiB: send less.",
)


class BodyOverdue(Exception):
    """The body did not arrive in time."""


class MalformedFraming(Exception):
    """The body is not valid HTTP: its chunks are malformed, or their extensions are too large."""


def refuse_in_plain_text(refusal: Refusal) -> ASGIApp:
    """Return the answer of a server without an API: plain text, neither logged nor counted."""
    return Response(refusal.status, refusal.message.encode(), [PLAIN_TEXT, *refusal.headers])
