"""Turns exceptions into responses: status, code, message, headers, and the reasons that are logged."""

from asyncio import CancelledError
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Literal

import structlog
from litestar import Request
from litestar.exceptions import ClientException, HTTPException, MethodNotAllowedException, NotFoundException
from litestar.exceptions.http_exceptions import RequestEntityTooLarge

from service.api.envelope import ErrorCode, ErrorEnvelope, FieldError, JSONResponse, fail
from service.authentication.access_tokens import InvalidCredentials
from service.authentication.authenticator import InsufficientScope
from service.authentication.signing_keys import SigningKeysUnavailable
from service.calculation_requests import model
from service.calculation_requests.changing import RequestLocked
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.event_history import CursorOutdated
from service.calculation_requests.request_secrets import SecretKeyMissing, WrongSecret
from service.identifiers import parse_uuid
from service.postgres.outages import PostgresUnavailable
from service.server.asgi import Scope
from service.server.limits import LARGEST_BODY
from service.telemetry import logs

Failure = tuple[ErrorCode, str]  # why a field is rejected: the code, and the message for the caller

CLOSE = {"connection": "close"}  # because what follows may be the rest of the body, or the next request
_SOON = {"retry-after": "1"}

_log = structlog.get_logger()


class ApiError(Exception):
    """An HTTP request is rejected, with a reason for the caller."""

    def __init__(
        self,
        status: HTTPStatus,
        code: ErrorCode,
        message: str,
        headers: Mapping[str, str] = {},
        *,
        # The error code in WWW-Authenticate (RFC 6750, section 3.1); with "" the challenge has no code.
        challenge: Literal["", "invalid_request", "invalid_token", "insufficient_scope"] | None = None,
        scope: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.errors = [FieldError(code, message, None, None)]
        self.headers = dict(headers)
        if challenge is not None:  # RFC 6750, section 3
            value = 'Bearer realm="calculation-requests"'
            if challenge:
                value += f', error="{challenge}", error_description="{message}"'
            if scope is not None:
                value += f', scope="{scope}"'
            self.headers["www-authenticate"] = value


class InvalidSubmission(ApiError):
    """Some fields of the body, or some query parameters, are invalid."""

    def __init__(self, errors: list[FieldError]) -> None:
        super().__init__(HTTPStatus.UNPROCESSABLE_ENTITY, errors[0].code, errors[0].message)
        self.errors = errors


def _unavailable(message: str) -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "unavailable", message, _SOON)


_OVERLOADED = _unavailable(
    "The service is overloaded, or its database is down: try again after the time in Retry-After."
)

# Exceptions of which callers and operators need the same words. The docstring of the class is the message.
_IN_ITS_WORDS: Mapping[type[BaseException], tuple[HTTPStatus, ErrorCode, Mapping[str, str]]] = {
    model.TooManyEmails: (HTTPStatus.CONFLICT, "too_many_emails", {"retry-after": "60"}),
    CursorOutdated: (HTTPStatus.GONE, "cursor_outdated", {}),
    model.IdempotencyKeyInFlight: (HTTPStatus.CONFLICT, "idempotency_key_in_flight", _SOON),
    model.IdempotencyKeyReused: (HTTPStatus.UNPROCESSABLE_ENTITY, "idempotency_key_reused", {}),
    SecretKeyMissing: (HTTPStatus.SERVICE_UNAVAILABLE, "secret_unavailable", {"retry-after": "60"}),
    SigningKeysUnavailable: (HTTPStatus.SERVICE_UNAVAILABLE, "unavailable", _SOON),
}

# The responses to exceptions that Litestar raises, and to those of the packages that the API calls. An
# exception gets the response of its class or, if its class is not listed, of its closest base class that is.
_ANSWERED_AS: Mapping[type[BaseException], ApiError] = {
    # Raised by Litestar's router and body reader.
    ClientException: ApiError(
        HTTPStatus.BAD_REQUEST,
        "malformed_request",
        "The HTTP request is malformed: check its path and its Host header.",
        CLOSE,
    ),
    NotFoundException: ApiError(
        HTTPStatus.NOT_FOUND, "not_found", "There is nothing at this path: /schema lists the paths."
    ),
    RequestEntityTooLarge: ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "body_too_large",
        f"The body is larger than {LARGEST_BODY // 1024} KiB: send less.",
        CLOSE,
    ),
    WrongSecret: ApiError(
        HTTPStatus.UNAUTHORIZED,
        "unauthenticated",
        "The token is neither an access token nor the secret of this request.",
        challenge="invalid_token",
    ),
    UnknownConveyancer: ApiError(
        HTTPStatus.FORBIDDEN,
        "unknown_conveyancer",
        "The access token names a conveyancer that is not registered, or is disabled: ask the operators.",
    ),
    model.RequestNotFound: ApiError(
        HTTPStatus.NOT_FOUND, "not_found", "There is no request with this uuid that this token may read."
    ),
    model.AlreadyErased: ApiError(
        HTTPStatus.GONE,
        "erased",
        "The request was erased for good: to make another one, send a new Idempotency-Key.",
    ),
    model.AlreadyWithdrawn: ApiError(
        HTTPStatus.CONFLICT,
        "withdrawn",
        "The request was withdrawn: to make another one, send a new Idempotency-Key.",
    ),
    PostgresUnavailable: _OVERLOADED,
    RequestLocked: _OVERLOADED,
    **{
        kind: ApiError(status, code, str(kind.__doc__), headers)
        for kind, (status, code, headers) in _IN_ITS_WORDS.items()
    },
    # The process is stopping, and has cancelled the HTTP request.
    CancelledError: _unavailable(
        "The service stopped before it could answer: try again after the time in Retry-After."
    ),
    Exception: ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "internal_error",
        "Internal error. It has been logged: quote the X-Request-Id when you report it.",
    ),
}


def translate(error: BaseException) -> ApiError:
    """Return the ApiError for an HTTP request that failed with *error*."""
    match error:
        case ApiError():
            return error
        case InvalidCredentials():
            return ApiError(HTTPStatus.UNAUTHORIZED, "unauthenticated", str(error), challenge="invalid_token")
        case InsufficientScope():
            return ApiError(
                HTTPStatus.FORBIDDEN,
                "insufficient_scope",
                str(error),
                challenge="insufficient_scope",
                scope=error.scope,
            )
        case MethodNotAllowedException():
            return ApiError(
                HTTPStatus.METHOD_NOT_ALLOWED,
                "method_not_allowed",
                "This path does not have this method: the Allow header lists those that it has.",
                error.headers or {},
            )
        case HTTPException(detail="client disconnected prematurely"):  # Litestar's words
            return _ANSWERED_AS[ClientException]  # Nobody reads the response.
    return next(_ANSWERED_AS[each] for each in type(error).__mro__ if each in _ANSWERED_AS)


def refuse(scope: Scope, error: BaseException) -> JSONResponse[ErrorEnvelope]:
    """Return the response to a request that failed with *error*. Keeps the error codes for the access log."""
    refused = translate(error)
    scope["state"]["error_codes"] = list(dict.fromkeys(each.code for each in refused.errors))
    if refused.status == HTTPStatus.UNAUTHORIZED:
        scope["state"]["reason"] = refused.errors[0].message  # The error code does not say why.
    content = fail(refused.status, refused.errors)
    return JSONResponse(content, status_code=refused.status, headers=refused.headers)


def respond(request: Request[Any, Any, Any], error: Exception) -> JSONResponse[ErrorEnvelope]:
    """Answer any exception, and log what operators need. This is Litestar's exception handler."""
    answer = refuse(request.scope, error)
    facts = describe(request.scope)
    if answer.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
        _log.error("request_failed", **facts, **logs.describe(error))
    if answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE and error.__cause__ is not None:
        # Without a cause, nothing was tried, and the line in the access log is enough.
        _log.warning("request_turned_away", **facts, error=logs.summarize(error))
    return answer


def describe(scope: Scope) -> dict[str, Any]:
    """Return the fields of a log line about an HTTP request, except those that the outer layer binds.

    Of the path, only a valid uuid is logged, because anything may be in the rest.
    """
    state = scope["state"]
    uuid = state.get("uuid") or scope.get("path_params", {}).get("uuid")
    fields = {"uuid": uuid} if uuid and parse_uuid(uuid) else {}
    return fields | {name: state[name] for name in ("error_codes", "reason") if name in state}
