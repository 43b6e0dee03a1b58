"""Parses the Idempotency-Key header (draft-ietf-httpapi-…); calculation_requests/storing.py finds repeats."""

import re
from collections.abc import Sequence
from http import HTTPStatus

from litestar.openapi.spec import Parameter, Schema
from litestar.openapi.spec.enums import OpenAPIType

from service.api.errors import ApiError

REPLAYED = "Idempotent-Replayed"  # the header of a response to a repeat
# A string of RFC 8941 (section 3.3.3) without escapes, or a token. Unlike in RFC 8941, a token may begin with
# a digit, as many UUIDs do. A token has no comma, so two headers that a proxy joined by a comma are no key.
PATTERN = r"""^("[ !#-\[\]-~]{1,255}"|[A-Za-z0-9!#$%&'*+.^_`|~:/-]{1,255})$"""

# Not an argument of the handler, because Litestar would pass only one of several headers with this name.
IDEMPOTENCY_KEY = Parameter(
    name="Idempotency-Key",
    param_in="header",
    description="Makes it safe to send a request again: the same key with the same body returns the same "
    "request. Up to 255 characters, for example a UUID; in double quotes, spaces and more punctuation "
    "are allowed.",
    schema=Schema(type=OpenAPIType.STRING, pattern=PATTERN),
)


def parse_key(values: Sequence[str]) -> str | None:
    """Return the key in the *values* of the headers with this name, or None without any. Raises ApiError.

    `"a"` and `a` are the same key, because the draft requires quotes, but many callers send none.
    """
    if len(values) > 1:
        raise _refusal("There is more than one Idempotency-Key header: send one.")
    if not values:
        return None
    value = values[0].strip(" \t")
    key = value.strip('"')
    if not re.fullmatch(PATTERN, value):
        raise _refusal(
            "The Idempotency-Key is malformed: send 1 to 255 ASCII letters, digits, hyphens and underscores; "
            "or, in double quotes, printable ASCII without double quotes and backslashes."
        )
    return key


def _refusal(message: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, "invalid_idempotency_key", message)
