"""Every error that a caller can get: its status, code, message and headers, in one table."""

from http import HTTPStatus
from typing import Any, Literal

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import ClientException, HTTPException, MethodNotAllowedException, NotFoundException

from service.api.envelope import Answer, ErrorCode, FieldError
from service.api.idempotency_key import (
    IdempotencyKeyTooLong,
    MalformedIdempotencyKey,
    RepeatedIdempotencyKey,
)
from service.authentication.authenticator import (
    InsufficientScope,
    InvalidCredentials,
    MissingCredentials,
    NoBearerToken,
    RepeatedCredentials,
)
from service.authentication.signing_keys import SigningKeysUnavailable
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.idempotency import IdempotencyKeyInFlight, IdempotencyKeyReused
from service.calculation_requests.model import RequestErased, RequestNotFound
from service.calculation_requests.request_secrets import SecretKeyMissing, WrongSecret
from service.postgres.outages import PostgresUnavailable
from service.server import log_facts
from service.server.asgi import Header
from service.server.refusals import BodyOverdue, MalformedFraming, Refusal
from service.telemetry import logs

Failure = tuple[ErrorCode, str]  # why a field is refused: the code, and the message for the caller

LARGEST_BODY = 256 * 1024  # bytes
_RETRY_SECONDS = 1
_REPAIR_SECONDS = 60  # where an operator has to act first
_CLIENT_DISCONNECTED = "client disconnected prematurely"  # Litestar's words

_log = structlog.get_logger()


class InvalidSubmission(Exception):
    """Some fields of the body, or some query parameters, are not acceptable."""

    def __init__(self, errors: list[FieldError]) -> None:
        super().__init__(len(errors))
        self.errors = errors


class MalformedBody(Exception):
    """The body is not JSON."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The body is not readable JSON: {reason}.")


class BodyTooLarge(Exception):
    """The body is too large. Its size is known if the caller announced it."""

    def __init__(self, size: int | None) -> None:
        most = f"{LARGEST_BODY // 1024} KiB"
        super().__init__(
            f"The body is larger than {most}: send less."
            if size is None
            else f"The body has {size} bytes: at most {LARGEST_BODY} ({most}) are accepted."
        )


class MissingContentType(Exception):
    """The body is not declared as anything."""


class UnsupportedMediaType(Exception):
    """The body is not declared as JSON."""


class CompressedBody(Exception):
    """The body is declared as compressed."""


class ShutDown(Exception):
    """The process stopped while the request was being served."""


class ErrorKind(msgspec.Struct, frozen=True):
    """How an error is answered. `message` is None where the exception has one of its own."""

    status: HTTPStatus
    code: ErrorCode
    message: str | None
    retry_after_seconds: int | None = None
    # The error code in WWW-Authenticate (RFC 6750, section 3.1); "" makes a challenge without one.
    challenge: Literal["", "invalid_request", "invalid_token", "insufficient_scope"] | None = None


# An exception counts as the closest of its base classes in this table.
_KINDS: dict[type[Exception], ErrorKind] = {
    # Raised by Litestar's router and body reader.
    ClientException: ErrorKind(
        HTTPStatus.BAD_REQUEST,
        "malformed_request",
        "The HTTP request is malformed: check its path and its Host header.",
    ),
    NotFoundException: ErrorKind(
        HTTPStatus.NOT_FOUND, "not_found", "There is nothing at this path: /schema lists the paths."
    ),
    MethodNotAllowedException: ErrorKind(
        HTTPStatus.METHOD_NOT_ALLOWED,
        "method_not_allowed",
        "This path does not have this method: the Allow header lists those that it has.",
    ),
    BodyTooLarge: ErrorKind(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", None),
    MalformedBody: ErrorKind(HTTPStatus.BAD_REQUEST, "malformed_body", None),
    MalformedIdempotencyKey: ErrorKind(
        HTTPStatus.BAD_REQUEST,
        "invalid_idempotency_key",
        "The Idempotency-Key is malformed: send 1 to 255 ASCII letters, digits, hyphens and underscores; or, "
        "in double quotes, printable ASCII without double quotes and backslashes.",
    ),
    IdempotencyKeyTooLong: ErrorKind(HTTPStatus.BAD_REQUEST, "invalid_idempotency_key", None),
    RepeatedIdempotencyKey: ErrorKind(
        HTTPStatus.BAD_REQUEST,
        "invalid_idempotency_key",
        "There is more than one Idempotency-Key header: send one.",
    ),
    RepeatedCredentials: ErrorKind(
        HTTPStatus.BAD_REQUEST,
        "malformed_request",
        "There is more than one Authorization header: send one.",
        challenge="invalid_request",
    ),
    MissingCredentials: ErrorKind(
        HTTPStatus.UNAUTHORIZED,
        "unauthenticated",
        "The Authorization header is missing: send `Authorization: Bearer …` with an access token; a "
        "request's secret also reads that request, and an API key the questionnaire.",
        challenge="",  # Without credentials RFC 6750 wants no error code.
    ),
    NoBearerToken: ErrorKind(
        HTTPStatus.UNAUTHORIZED,
        "unauthenticated",
        "The Authorization header has no Bearer token: send `Authorization: Bearer …` with an access token; "
        "a request's secret also reads that request, and an API key the questionnaire.",
        challenge="",
    ),
    InvalidCredentials: ErrorKind(
        HTTPStatus.UNAUTHORIZED, "unauthenticated", None, challenge="invalid_token"
    ),
    WrongSecret: ErrorKind(
        HTTPStatus.UNAUTHORIZED,
        "unauthenticated",
        "The token is neither an access token nor the secret of this request.",
        challenge="invalid_token",
    ),
    InsufficientScope: ErrorKind(
        HTTPStatus.FORBIDDEN, "insufficient_scope", None, challenge="insufficient_scope"
    ),
    UnknownConveyancer: ErrorKind(
        HTTPStatus.FORBIDDEN,
        "unknown_conveyancer",
        "The access token names a conveyancer that is not registered, or is disabled: ask the operators.",
    ),
    RequestNotFound: ErrorKind(
        HTTPStatus.NOT_FOUND,
        "not_found",
        "There is no request with this uuid that this token may read.",
    ),
    RequestErased: ErrorKind(
        HTTPStatus.GONE,
        "erased",
        "The request was erased for good: to make another one, send a new Idempotency-Key.",
    ),
    MalformedFraming: ErrorKind(
        HTTPStatus.BAD_REQUEST, "malformed_request", "The body is not valid HTTP: check how it is chunked."
    ),
    BodyOverdue: ErrorKind(
        HTTPStatus.REQUEST_TIMEOUT,
        "request_timeout",
        "The body did not arrive in time: send the request again.",
    ),
    IdempotencyKeyInFlight: ErrorKind(
        HTTPStatus.CONFLICT,
        "idempotency_key_in_flight",
        "Another request with this Idempotency-Key is being stored: try again after the time in Retry-After.",
        retry_after_seconds=_RETRY_SECONDS,
    ),
    MissingContentType: ErrorKind(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        "unsupported_media_type",
        "The Content-Type header is missing: send `Content-Type: application/json`.",
    ),
    UnsupportedMediaType: ErrorKind(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        "unsupported_media_type",
        "The Content-Type header names another type than JSON: send `Content-Type: application/json`.",
    ),
    CompressedBody: ErrorKind(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        "unsupported_media_type",
        "The Content-Encoding header says that the body is compressed: send it uncompressed, without it.",
    ),
    IdempotencyKeyReused: ErrorKind(
        HTTPStatus.UNPROCESSABLE_ENTITY,
        "idempotency_key_reused",
        "This Idempotency-Key was used with a different body: a new request needs a new key.",
    ),
    PostgresUnavailable: ErrorKind(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "unavailable",
        "The service is overloaded, or its database is down: try again after the time in Retry-After.",
        retry_after_seconds=_RETRY_SECONDS,
    ),
    SigningKeysUnavailable: ErrorKind(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "unavailable",
        "The access token cannot be verified now: keep it, and try again after the time in Retry-After.",
        retry_after_seconds=_RETRY_SECONDS,
    ),
    ShutDown: ErrorKind(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "unavailable",
        "The service stopped before it could answer: try again after the time in Retry-After.",
        retry_after_seconds=_RETRY_SECONDS,
    ),
    SecretKeyMissing: ErrorKind(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "secret_unavailable",
        "The secret of this request is unavailable until an operator restores its key: try again later.",
        retry_after_seconds=_REPAIR_SECONDS,
    ),
    Exception: ErrorKind(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "internal_error",
        "Internal error. It has been logged: quote the X-Request-Id when you report it.",
    ),
}


def respond(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Answer any exception, and log what operators need to know: Litestar's exception handler."""
    answered = answer(error)
    facts = log_facts.of(request.scope)
    facts.error_codes = answered.error_codes
    facts.uuid = facts.uuid or log_facts.uuid_in_path(request.scope)
    if answered.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        _log.error("request_failed", **facts.describe(), **logs.describe(error))
    if isinstance(error, SecretKeyMissing):
        request.app.state.resources.secret_keys.report_missing(error)
    elif answered.status == HTTPStatus.SERVICE_UNAVAILABLE and error.__cause__ is not None:
        # Without a cause nothing was tried; the access log has a line for each caller already.
        _log.warning("request_turned_away", **facts.describe(), error=logs.summarize(error))
    headers = {name.decode(): value.decode() for name, value in answered.headers}
    return Response(answered.body, status_code=answered.status, headers=headers)


def answer(error: Exception) -> Answer:
    """Return the answer to a request that failed with *error*."""
    if isinstance(error, InvalidSubmission):
        return Answer.failed(HTTPStatus.UNPROCESSABLE_ENTITY, error.errors)
    if isinstance(error, HTTPException) and error.detail == _CLIENT_DISCONNECTED:
        return Answer.failed(HTTPStatus.BAD_REQUEST, [])  # Nobody reads it.
    kind = next(_KINDS[each] for each in type(error).__mro__ if each in _KINDS)
    message = kind.message or str(error)
    return Answer.failed(
        kind.status, [FieldError(kind.code, message, None, None)], *_headers(error, kind, message)
    )


def answer_refusal(refusal: Refusal, *headers: Header) -> Answer:
    """Return the answer to a request that the server or its probes refuse by themselves."""
    error = FieldError(refusal.code, refusal.message, None, None)
    return Answer.failed(refusal.status, [error], *refusal.headers, *headers)


def _headers(error: Exception, kind: ErrorKind, message: str) -> list[Header]:
    headers = []
    if isinstance(error, HTTPException):  # Allow, from the router.
        headers += [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    if kind.retry_after_seconds is not None:
        headers.append((b"retry-after", b"%d" % kind.retry_after_seconds))
    if kind.challenge is not None:
        challenge = 'Bearer realm="calculation-requests"'  # RFC 6750, section 3
        if kind.challenge:
            challenge += f', error="{kind.challenge}", error_description="{message}"'
        if isinstance(error, InsufficientScope):
            challenge += f', scope="{error.scope}"'
        headers.append((b"www-authenticate", challenge.encode()))
    return headers
