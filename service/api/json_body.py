"""Reads the body of an HTTP request as bytes, and checks its declared type, its size and its duration."""

import asyncio
from http import HTTPStatus
from typing import Any

from litestar import MediaType
from litestar.exceptions.http_exceptions import RequestEntityTooLarge

from service.api.errors import ApiError
from service.api.resources import ApiRequest
from service.server import limits
from service.server.limits import LARGEST_BODY


async def read(request: ApiRequest[Any]) -> bytes:
    """Return the body of an HTTP request. The body must be declared as JSON. Raises ApiError."""
    check_declared(request.headers.get("content-type"), request.headers.get("content-encoding"))
    try:
        async with asyncio.timeout(limits.BODY_SECONDS):
            return await request.body()
    except TimeoutError:
        raise body_overdue() from None
    except RequestEntityTooLarge:
        raise body_too_large(request.content_length) from None


def check_declared(content_type: str | None, encoding: str | None) -> None:
    """Raise ApiError unless a body is declared as uncompressed JSON."""
    if not content_type:
        raise _unsupported("The Content-Type header is missing: send `Content-Type: application/json`.")
    if content_type.partition(";")[0].strip().lower() != MediaType.JSON:
        raise _unsupported(
            "The Content-Type header names another type than JSON: send `Content-Type: application/json`."
        )
    if encoding is not None and encoding.lower() != "identity":
        raise _unsupported(
            "The Content-Encoding header declares compression: send uncompressed JSON without this header."
        )


def _unsupported(message: str) -> ApiError:
    return ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)


def body_overdue() -> ApiError:
    """Return the error for an overdue body. The body may still come, so the connection is closed."""
    return ApiError(
        HTTPStatus.REQUEST_TIMEOUT,
        "request_timeout",
        "The body did not arrive in time: send the request again.",
        (b"connection", b"close"),
    )


def body_too_large(size: int | None) -> ApiError:
    """Return the error for a body that is too large. *size* is None if the caller did not declare it."""
    most = f"{LARGEST_BODY // 1024} KiB"
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "body_too_large",
        f"The body is larger than {most}: send less."
        if size is None
        else f"The body has {size} bytes: at most {LARGEST_BODY} ({most}) are accepted.",
    )
