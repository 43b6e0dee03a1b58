"""The response envelope of every endpoint, and every error as one."""

from collections.abc import Iterator
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec
import structlog
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.types import HTTPResponseBodyEvent, HTTPResponseStartEvent, Receive, Scope, Send

from service.api.errors import ErrorCode, FieldError, InvalidSubmission, MalformedBody
from service.api.idempotency_key import MalformedIdempotencyKey
from service.authentication.authenticator import InsufficientScope, RepeatedCredentials, Unauthenticated
from service.authentication.signing_keys import SigningKeysUnavailable
from service.calculation_requests import request_secrets
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.idempotency import IdempotencyKeyInFlight, IdempotencyKeyReused
from service.calculation_requests.model import RequestNotFound
from service.calculation_requests.request_secrets import SecretKeyMissing
from service.postgres.outages import PostgresUnavailable
from service.server.refusals import BodyOverdue, MalformedFraming, Refusal
from service.telemetry import logs

RETRY_AFTER_SECONDS = 1
_REPAIR_SECONDS = 60  # before another attempt, where an operator has to act

Data = TypeVar("Data")
Header: TypeAlias = tuple[bytes, bytes]  # a name in lower case, and a value

_log = structlog.get_logger()


class UnsupportedMediaType(Exception):
    """The body must be sent as application/json."""


class Status(msgspec.Struct, frozen=True):
    """An HTTP status, repeated in the body."""

    code: int
    message: str


class Meta(msgspec.Struct, frozen=True):
    """When the response was made: ISO 8601 with fractional seconds and UTC offset."""

    timestamp: Annotated[str, msgspec.Meta(extra_json_schema={"format": "date-time"})]


class Envelope(msgspec.Struct, Generic[Data], frozen=True):
    """What every endpoint returns on success (interface, *Response envelope*)."""

    status: Status
    data: Data
    errors: None
    meta: Meta


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The envelope when a request failed: there are errors, and no data."""

    status: Status
    data: None
    errors: list[FieldError]
    meta: Meta


_HUNG_UP = "client disconnected prematurely"  # Litestar's words

_encoder = msgspec.json.Encoder()
_JSON: Header = (b"content-type", MediaType.JSON.value.encode())
_OK = Status(HTTPStatus.OK, HTTPStatus.OK.phrase)


def succeed(data: Data) -> Envelope[Data]:
    """Wrap the payload of a successful operation."""
    return Envelope(_OK, data, None, _meta())


class Answer:
    """A response as it goes out: Litestar takes an ASGI application as it is, and its own cost more."""

    def __init__(self, status: HTTPStatus, headers: list[Header], body: bytes) -> None:
        self._start: HTTPResponseStartEvent = {
            "type": "http.response.start",
            "status": int(status),
            "headers": headers,
        }
        self._body: HTTPResponseBodyEvent = {"type": "http.response.body", "body": body, "more_body": False}

    @classmethod
    def ok(cls, data: object, *headers: Header) -> "Answer":
        """Return *data* in its envelope."""
        body = _encoder.encode(succeed(data))
        length = (b"content-length", b"%d" % len(body))
        return cls(HTTPStatus.OK, [_JSON, length, *headers], body)

    @classmethod
    def failed(cls, status: HTTPStatus, code: ErrorCode, message: str, *headers: Header) -> "Answer":
        """Return a failure that is not an exception of the application."""
        body = encode_failure(status, code, message)
        return cls(status, [_JSON, (b"content-length", b"%d" % len(body)), *headers], body)

    @classmethod
    def refusing(cls, refusal: Refusal, *headers: Header) -> "Answer":
        """Return the answer to a request that the server refuses by itself."""
        return cls.failed(refusal.status, refusal.code, refusal.message, *refusal.headers, *headers)

    @classmethod
    def cut_off(cls) -> "Answer":
        """Return the answer to a request that is under way when the time for shutdown is over."""
        status, message = HTTPStatus.SERVICE_UNAVAILABLE, "The service stopped before it had an answer."
        return cls.failed(status, "unavailable", message, (b"retry-after", b"%d" % RETRY_AFTER_SECONDS))

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send it."""
        await send(self._start)
        await send(self._body)


def _meta() -> Meta:
    return Meta(datetime.now(UTC).isoformat(timespec="microseconds"))


# Every fact that the code raises, with the status and code that callers see. Its docstring is the message.
_ANSWERS: dict[type[Exception], tuple[HTTPStatus, ErrorCode]] = {
    MalformedBody: (HTTPStatus.BAD_REQUEST, "malformed_body"),
    RepeatedCredentials: (HTTPStatus.BAD_REQUEST, "malformed_request"),
    MalformedIdempotencyKey: (HTTPStatus.BAD_REQUEST, "invalid_idempotency_key"),
    Unauthenticated: (HTTPStatus.UNAUTHORIZED, "unauthenticated"),
    InsufficientScope: (HTTPStatus.FORBIDDEN, "insufficient_scope"),
    UnknownConveyancer: (HTTPStatus.FORBIDDEN, "unknown_conveyancer"),
    RequestNotFound: (HTTPStatus.NOT_FOUND, "not_found"),
    MalformedFraming: (HTTPStatus.BAD_REQUEST, "malformed_request"),
    BodyOverdue: (HTTPStatus.REQUEST_TIMEOUT, "request_timeout"),
    IdempotencyKeyInFlight: (HTTPStatus.CONFLICT, "idempotency_key_in_flight"),
    UnsupportedMediaType: (HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type"),
    IdempotencyKeyReused: (HTTPStatus.UNPROCESSABLE_ENTITY, "idempotency_key_reused"),
    PostgresUnavailable: (HTTPStatus.SERVICE_UNAVAILABLE, "unavailable"),
    SigningKeysUnavailable: (HTTPStatus.SERVICE_UNAVAILABLE, "unavailable"),
    SecretKeyMissing: (HTTPStatus.SERVICE_UNAVAILABLE, "secret_unavailable"),
}

# What Litestar's router and body reader raise.
_ROUTER_CODES: dict[int, ErrorCode] = {
    HTTPStatus.BAD_REQUEST: "malformed_request",  # a Host that is none
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body_too_large",
}


def as_envelope(_: Request[Any, Any, Any], error: Exception) -> Response[ErrorEnvelope]:
    """Answer any exception in the envelope; an unforeseen one is logged and told to nobody."""
    response = answer(error)
    if response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
        _log.error("request_failed", **logs.describe(error))
    if isinstance(error, SecretKeyMissing):
        request_secrets.note_missing([error.key_id])
    elif response.status_code == HTTPStatus.SERVICE_UNAVAILABLE and error.__cause__ is not None:
        # Without a cause nothing was tried; the access log has a line for each caller already.
        _log.warning("request_turned_away", error=logs.summarize(error))
    return response


def answer(error: Exception) -> Response[ErrorEnvelope]:
    """Return what a caller is told of *error*."""
    if isinstance(error, InvalidSubmission):
        return _fail(HTTPStatus.UNPROCESSABLE_ENTITY, error.errors, {})
    if type(error) in _ANSWERS:
        status, code = _ANSWERS[type(error)]
        reason = error.reason if isinstance(error, Unauthenticated) else None
        problem = FieldError(code, reason or error.__doc__ or "", None, None)
        return _fail(status, [problem], _headers(error))
    if isinstance(error, HTTPException) and error.status_code in _ROUTER_CODES:
        status = HTTPStatus(error.status_code)
        problem = FieldError(_ROUTER_CODES[status], f"{status.phrase}.", None, None)
        return _fail(status, [problem], dict(error.headers or {}))
    if isinstance(error, HTTPException) and error.detail == _HUNG_UP:
        return _fail(HTTPStatus.BAD_REQUEST, [], {})  # Nobody is there to read it.
    problem = FieldError("internal_error", "The service failed; it has been told.", None, None)
    return _fail(HTTPStatus.INTERNAL_SERVER_ERROR, [problem], {})


def encode_failure(status: HTTPStatus, code: ErrorCode, message: str) -> bytes:
    """Return the envelope of an answer that the application is not asked for."""
    problem = FieldError(code, message, None, None)
    return msgspec.json.encode(ErrorEnvelope(Status(status, status.phrase), None, [problem], _meta()))


def _headers(error: Exception) -> dict[str, str]:
    match error:
        case Unauthenticated() | RepeatedCredentials() | InsufficientScope():
            return {"WWW-Authenticate": ", ".join(_challenge(error))}
        case IdempotencyKeyInFlight() | PostgresUnavailable() | SigningKeysUnavailable():
            return {"Retry-After": str(RETRY_AFTER_SECONDS)}
        case SecretKeyMissing():
            return {"Retry-After": str(_REPAIR_SECONDS)}
    return {}


def _challenge(error: Unauthenticated | RepeatedCredentials | InsufficientScope) -> Iterator[str]:
    """Return the parts of a challenge (RFC 6750, section 3)."""
    yield 'Bearer realm="calculation-requests"'
    match error:
        case Unauthenticated(reason=str(reason)):
            yield f'error="invalid_token", error_description="{reason}"'
        case RepeatedCredentials():
            yield f'error="invalid_request", error_description="{RepeatedCredentials.__doc__}"'
        case InsufficientScope(scope=scope):
            yield 'error="insufficient_scope", error_description="The access token does not carry the scope"'
            yield f'scope="{scope}"'


def _fail(status: HTTPStatus, errors: list[FieldError], headers: dict[str, str]) -> Response[ErrorEnvelope]:
    envelope = ErrorEnvelope(Status(status, status.phrase), None, errors, _meta())
    return Response(envelope, status_code=status, headers=headers, media_type=MediaType.JSON)
