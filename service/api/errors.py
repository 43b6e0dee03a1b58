"""The words in which a caller is told what was wrong."""

from typing import Literal

import msgspec

# Every code that an error can have. Whoever handles errors by code can rely on this list being complete.
ErrorCode = Literal[
    "malformed_request",
    "malformed_body",
    "invalid_idempotency_key",
    "unauthenticated",
    "insufficient_scope",
    "unknown_conveyancer",
    "not_found",
    "method_not_allowed",
    "request_timeout",
    "idempotency_key_in_flight",
    "body_too_large",
    "unsupported_media_type",
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
    "head_too_large",
    "internal_error",
    "unavailable",
    "secret_unavailable",
]

Failure = tuple[ErrorCode, str]  # and a sentence for the caller


class MalformedBody(Exception):
    """The body is not JSON that can be read: bad syntax, not UTF-8, or nested too deeply."""


class FieldError(msgspec.Struct, frozen=True):
    """One reason why one field was refused; `pointer` is a JSON pointer (RFC 6901) into the body."""

    code: ErrorCode
    message: str
    field: str | None
    pointer: str | None


class InvalidSubmission(Exception):
    """Some fields are missing or not acceptable."""

    def __init__(self, errors: list[FieldError]) -> None:
        super().__init__(len(errors))
        self.errors = errors
