"""An HTTP request to the API: its caller, and its body until it is decoded."""

import asyncio
from http import HTTPStatus
from typing import Any, TypeVar

from litestar import MediaType, Request
from litestar.datastructures import State

from service.api.errors import CLOSE, ApiError
from service.api.resources import Resources
from service.server import limits

User = TypeVar("User")


class ApiRequest(Request[User, Any, State]):
    """An HTTP request to the API. Its `user` is the caller that was admitted."""

    @property
    def resources(self) -> Resources:
        """What the handlers use."""
        opened: Resources = self.app.state.resources
        return opened

    async def body(self) -> bytes:
        """Return the body. Raises ApiError if it is not declared as JSON, empty or overdue."""
        # Litestar's `get` returns one of several headers with the same name.
        declared = (self.headers.getall(name, []) for name in ("content-type", "content-encoding"))
        check_declared(*map(", ".join, declared))
        try:
            async with asyncio.timeout(limits.BODY_SECONDS):
                body = await super().body()
        except TimeoutError:
            raise body_overdue() from None
        if not body:  # Litestar would not ask the decoder.
            raise malformed_body("it is empty")
        return body


def check_declared(content_type: str, encoding: str) -> None:
    """Raise ApiError unless a body is declared as uncompressed JSON. Litestar does not check it."""
    if content_type.partition(";")[0].strip().lower() != MediaType.JSON:
        raise _unsupported(
            "The Content-Type header does not declare JSON: send `Content-Type: application/json`."
        )
    if encoding.lower() not in {"", "identity"}:
        raise _unsupported(
            "The Content-Encoding header declares compression: send uncompressed JSON without this header."
        )


def _unsupported(message: str) -> ApiError:
    return ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)


def malformed_body(reason: str) -> ApiError:
    """Return the error for a body that is not JSON."""
    return ApiError(HTTPStatus.BAD_REQUEST, "malformed_body", f"The body is not readable JSON: {reason}.")


def body_overdue() -> ApiError:
    """Return the error for a body that has not arrived in time."""
    message = "The body did not arrive in time: send the request again."
    return ApiError(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", message, CLOSE)
