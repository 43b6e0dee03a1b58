"""The response envelope of every endpoint, and every error as one."""

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Generic, TypeVar

import msgspec
import structlog
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException

from service import telemetry
from service.auth import InsufficientScope, Unauthenticated
from service.calculation_requests import RequestNotFound
from service.conveyancers import UnknownConveyancer
from service.idempotency import IdempotencyKeyInFlight, IdempotencyKeyReused, MalformedIdempotencyKey
from service.postgres import PostgresUnavailable
from service.signing_keys import SigningKeysUnavailable
from service.submissions import FieldError, InvalidSubmission, MalformedBody

RETRY_AFTER_SECONDS = 1

Data = TypeVar("Data")

_log = structlog.get_logger()


class UnsupportedMediaType(Exception):
    """The body must be sent as application/json."""


class NotModified(Exception):
    """The caller has what it asks for."""

    def __init__(self, headers: dict[str, str]) -> None:
        super().__init__()
        self.headers = headers


class Status(msgspec.Struct, frozen=True):
    """An HTTP status, repeated in the body."""

    code: int
    message: str


class Meta(msgspec.Struct, frozen=True):
    """When the response was made: ISO 8601 with fractional seconds and UTC offset."""

    timestamp: str


class Envelope(msgspec.Struct, Generic[Data], frozen=True):
    """What every endpoint returns (interface, *Response envelope*)."""

    status: Status
    data: Data
    errors: list[FieldError] | None
    meta: Meta


_HUNG_UP = "client disconnected prematurely"  # Litestar's words

_OK = Status(HTTPStatus.OK, HTTPStatus.OK.phrase)


def succeed(data: Data) -> Envelope[Data]:
    """Wrap the payload of a successful operation."""
    return Envelope(_OK, data, None, _meta())


def _meta() -> Meta:
    return Meta(datetime.now(UTC).isoformat(timespec="microseconds"))


# Every fact that the code raises, with the status and code that callers see. Its docstring is the message.
_ANSWERS: dict[type[Exception], tuple[HTTPStatus, str]] = {
    MalformedBody: (HTTPStatus.BAD_REQUEST, "malformed_body"),
    MalformedIdempotencyKey: (HTTPStatus.BAD_REQUEST, "invalid_idempotency_key"),
    Unauthenticated: (HTTPStatus.UNAUTHORIZED, "unauthenticated"),
    InsufficientScope: (HTTPStatus.FORBIDDEN, "insufficient_scope"),
    UnknownConveyancer: (HTTPStatus.FORBIDDEN, "unknown_conveyancer"),
    RequestNotFound: (HTTPStatus.NOT_FOUND, "not_found"),
    IdempotencyKeyInFlight: (HTTPStatus.CONFLICT, "idempotency_key_in_flight"),
    UnsupportedMediaType: (HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type"),
    InvalidSubmission: (HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_submission"),
    IdempotencyKeyReused: (HTTPStatus.UNPROCESSABLE_ENTITY, "idempotency_key_reused"),
    PostgresUnavailable: (HTTPStatus.SERVICE_UNAVAILABLE, "unavailable"),
    SigningKeysUnavailable: (HTTPStatus.SERVICE_UNAVAILABLE, "unavailable"),
}

# What Litestar's router and body reader raise.
_ROUTER_CODES = {
    HTTPStatus.BAD_REQUEST: "malformed_body",
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body_too_large",
}


def as_envelope(_: Request[Any, Any, Any], error: Exception) -> Response[Envelope[None] | None]:
    """Answer any exception in the envelope; an unforeseen one is logged and told to nobody."""
    if isinstance(error, NotModified):
        return Response(None, status_code=HTTPStatus.NOT_MODIFIED, headers=error.headers)
    if type(error) in _ANSWERS:
        status, code = _ANSWERS[type(error)]
        return _fail(status, _errors(error, code), _headers(error))
    if isinstance(error, HTTPException) and error.status_code in _ROUTER_CODES:
        status = HTTPStatus(error.status_code)
        problem = FieldError(_ROUTER_CODES[status], f"{status.phrase}.", None, None)
        return _fail(status, [problem], dict(error.headers or {}))
    if isinstance(error, HTTPException) and error.detail == _HUNG_UP:
        return _fail(HTTPStatus.BAD_REQUEST, [], {})  # Nobody is there to read it.
    _log.error("request_failed", **telemetry.describe(error))
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    return _fail(
        status, [FieldError("internal_error", "The service failed; it has been told.", None, None)], {}
    )


def encode_failure(status: HTTPStatus, code: str, message: str) -> bytes:
    """Return the envelope of an answer that the application is not asked for."""
    problem = FieldError(code, message, None, None)
    return msgspec.json.encode(Envelope(Status(status, status.phrase), None, [problem], _meta()))


def _errors(error: Exception, code: str) -> list[FieldError]:
    if isinstance(error, InvalidSubmission):
        return error.errors
    message = (error.reason if isinstance(error, Unauthenticated) else None) or (error.__doc__ or "")
    return [FieldError(code, message, None, None)]


def _headers(error: Exception) -> dict[str, str]:
    match error:
        case Unauthenticated(reason=None):
            return {"WWW-Authenticate": 'Bearer realm="calculation-requests"'}
        case Unauthenticated(reason=reason):
            return {
                "WWW-Authenticate": 'Bearer realm="calculation-requests", error="invalid_token", '
                f'error_description="{reason}"'
            }
        case InsufficientScope(scope=scope):
            return {
                "WWW-Authenticate": 'Bearer realm="calculation-requests", error="insufficient_scope", '
                f'error_description="The access token does not carry the scope", scope="{scope}"'
            }
        case IdempotencyKeyInFlight() | PostgresUnavailable() | SigningKeysUnavailable():
            return {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return {}


def _fail(
    status: HTTPStatus, errors: list[FieldError], headers: dict[str, str]
) -> Response[Envelope[None] | None]:
    envelope = Envelope(Status(status, status.phrase), None, errors, _meta())
    return Response(envelope, status_code=status, headers=headers, media_type=MediaType.JSON)
