"""The envelope around every answer of the API in JSON."""

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from litestar import Response

from service.server import asgi

ErrorCode = Literal[
    "malformed_request",
    "malformed_body",
    "invalid_idempotency_key",
    "unauthenticated",
    "insufficient_scope",
    "unknown_conveyancer",
    "not_found",
    "erased",
    "cursor_outdated",
    "method_not_allowed",
    "request_timeout",
    "idempotency_key_in_flight",
    "withdrawn",
    "too_many_emails",
    "body_too_large",
    "unsupported_media_type",
    "unsupported_transfer_encoding",
    "required",
    "blank",
    "invalid_type",
    "invalid_choice",
    "invalid_email",
    "invalid_characters",
    "out_of_range",
    "too_long",
    "too_deep",
    "unknown_field",
    "invalid_cursor",
    "repeated",
    "idempotency_key_reused",
    "internal_error",
    "unavailable",
    "secret_unavailable",
]

Data = TypeVar("Data")


class Status(msgspec.Struct, frozen=True):
    """The HTTP status, repeated in the body."""

    code: int
    message: str


class Meta(msgspec.Struct, frozen=True):
    """When the answer was made: ISO 8601 with fractional seconds and UTC offset."""

    timestamp: Annotated[str, msgspec.Meta(extra_json_schema={"format": "date-time"})]


class FieldError(msgspec.Struct, frozen=True):
    """An error of one field or parameter or, if `field` is null, of the whole HTTP request.

    `pointer` is a JSON pointer (RFC 6901) into the body.
    """

    code: ErrorCode
    message: str
    field: str | None
    pointer: str | None


class Envelope(msgspec.Struct, Generic[Data], frozen=True):
    """The body of every successful answer."""

    status: Status
    data: Data
    errors: None
    meta: Meta


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The body of every failed answer: it has errors and no data."""

    status: Status
    data: None
    errors: list[FieldError]
    meta: Meta


_OK = Status(HTTPStatus.OK, HTTPStatus.OK.phrase)


def succeed(data: Data) -> Envelope[Data]:
    """Wrap the payload of a successful operation."""
    return Envelope(_OK, data, None, _meta())


def fail(status: HTTPStatus, errors: list[FieldError]) -> ErrorEnvelope:
    """Wrap the errors of a failed operation."""
    return ErrorEnvelope(Status(status, status.phrase), None, errors, _meta())


def _meta() -> Meta:
    return Meta(datetime.now(UTC).isoformat(timespec="microseconds"))


class JSONResponse(Response[Data]):
    """A response of content and headers alone. Litestar's own takes 16 µs more, of 72 for the simplest call.

    It looks for cookies, encoders, background tasks and media types, of which this API has none.
    """

    def to_asgi_response(self, *_: object, status_code: int | None = None, **__: object) -> Any:  # noqa: ANN401
        """Return the response as an ASGI application, as Litestar asks of each Response."""
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        status = self.status_code or status_code or HTTPStatus.OK
        if self.content is None:
            return asgi.Response(status, headers, b"")
        return asgi.Response.of(status, b"application/json", msgspec.json.encode(self.content), *headers)
