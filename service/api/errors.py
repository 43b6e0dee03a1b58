"""Every error that a caller can get: its status, code, message and headers, in one table."""

from http import HTTPStatus
from typing import Any, Literal

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import ClientException, HTTPException, MethodNotAllowedException, NotFoundException
from litestar.exceptions.http_exceptions import RequestEntityTooLarge

from service.api import notes
from service.api.envelope import Answer, ErrorCode, FieldError
from service.api.idempotency_key import MalformedIdempotencyKey
from service.authentication.authenticator import (
    InsufficientScope,
    InvalidCredentials,
    MissingCredentials,
    RepeatedCredentials,
)
from service.authentication.signing_keys import SigningKeysUnavailable
from service.calculation_requests import request_secrets
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.idempotency import IdempotencyKeyInFlight, IdempotencyKeyReused
from service.calculation_requests.model import RequestNotFound
from service.calculation_requests.request_secrets import SecretKeyMissing
from service.postgres.outages import PostgresUnavailable
from service.server.asgi import Header
from service.server.refusals import BodyOverdue, MalformedFraming, Refusal
from service.telemetry import logs

Failure = tuple[ErrorCode, str]  # why a field is refused: the code, and the message for the caller

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


class UnsupportedMediaType(Exception):
    """The body is not declared as JSON."""


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
    RequestEntityTooLarge: ErrorKind(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", "The body is larger than 256 KiB."
    ),
    MalformedBody: ErrorKind(
        HTTPStatus.BAD_REQUEST,
        "malformed_body",
        "The body is not readable JSON: check its syntax, that it is UTF-8, and how deep it nests.",
    ),
    MalformedIdempotencyKey: ErrorKind(
        HTTPStatus.BAD_REQUEST,
        "invalid_idempotency_key",
        "Send one Idempotency-Key of 1 to 255 letters, digits or punctuation; quote it if it has spaces.",
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
        "Send an access token as `Authorization: Bearer …`; the questionnaire also takes an API key.",
        challenge="",  # Without credentials RFC 6750 wants no error code.
    ),
    InvalidCredentials: ErrorKind(
        HTTPStatus.UNAUTHORIZED, "unauthenticated", None, challenge="invalid_token"
    ),
    InsufficientScope: ErrorKind(
        HTTPStatus.FORBIDDEN, "insufficient_scope", None, challenge="insufficient_scope"
    ),
    UnknownConveyancer: ErrorKind(
        HTTPStatus.FORBIDDEN,
        "unknown_conveyancer",
        "The access token names a conveyancer that is not registered: ask the operators to register it.",
    ),
    RequestNotFound: ErrorKind(HTTPStatus.NOT_FOUND, "not_found", "You have no request with this uuid."),
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
    UnsupportedMediaType: ErrorKind(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", "Send the body as application/json."
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
    noted = notes.of(request.scope)
    noted.error_codes = answered.error_codes
    if answered.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        _log.error("request_failed", **noted.describe(), **logs.describe(error))
    if isinstance(error, SecretKeyMissing):
        request_secrets.note_missing([error.key_id])
    elif answered.status == HTTPStatus.SERVICE_UNAVAILABLE and error.__cause__ is not None:
        # Without a cause nothing was tried; the access log has a line for each caller already.
        _log.warning("request_turned_away", **noted.describe(), error=logs.summarize(error))
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
