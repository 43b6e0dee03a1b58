"""The parameters and headers of the OpenAPI document, by name."""

from typing import Any

from service import text_rules
from service.api import idempotency_key_header, list_query
from service.api.request_body import LINE

EXAMPLE_UUID = "req_01a9ZkW3mT6qPxB8vNcR4d"
_NOT_FILLED = {"x-fill-example": "no"}  # Otherwise RapiDoc would send the example with every call.

PARAMETERS: dict[str, dict[str, Any]] = {
    "uuid": {
        "in": "path",
        "required": True,
        "description": "The `uuid` of the request, as create returned it.",
        "schema": {"type": "string"},
        "example": EXAMPLE_UUID,
    },
    "external_id": {
        "in": "query",
        "description": "Only requests with this identifier in the caller's own system.",
        "schema": {"type": "string", "maxLength": text_rules.CHARACTERS, **LINE},
        "example": "case-17",
        **_NOT_FILLED,
    },
    "updated_since": {
        "in": "query",
        "description": "Only requests that have a calculation and were changed since this time, oldest "
        "change first. Begin with any time, and go on with the `next_updated_since` of the last page.",
        "schema": {"type": "string", "format": "date-time"},
        "example": "2026-03-02T09:30:00Z",
        **_NOT_FILLED,
    },
    "limit": {
        "in": "query",
        "description": "The maximum number of requests on a page. Large requests make pages shorter: a "
        "page with fewer requests is the last one only if its `next_cursor` is null.",
        "schema": {
            "type": "integer",
            "minimum": 1,
            "maximum": list_query.LARGEST_LIMIT,
            "default": list_query.DEFAULT_LIMIT,
        },
    },
    "cursor": {
        "in": "query",
        "description": "The `next_cursor` of the previous page, with its other parameters. Leave it out for "
        "the first page.",
        "schema": {"type": "string", "pattern": r"^([0-9]{1,10}\.)?req_[0-6][0-9A-Za-z]{21}$"},
        "example": EXAMPLE_UUID,
        **_NOT_FILLED,
    },
    "Idempotency-Key": {
        "in": "header",
        "description": "Makes it safe to send a request again: the same key with the same body returns the "
        "same request. Up to 255 characters, for example a UUID; in double quotes, spaces and more "
        "punctuation are allowed.",
        "schema": {"type": "string", "pattern": idempotency_key_header.PATTERN},
    },
    "If-None-Match": {
        "in": "header",
        "description": "The `ETag` of the questions that the caller already has.",
        "schema": {"type": "string"},
    },
    "X-Request-Id": {
        "in": "header",
        "description": "Repeated in the answer and logged, if it has at most 128 letters, digits, `.`, `_` "
        "or `-` and begins with a letter or digit. Otherwise it is replaced.",
        "schema": {"type": "string", "examples": ["case-17"]},
        **_NOT_FILLED,
    },
    "traceparent": {
        "in": "header",
        "description": "W3C Trace Context, passed on with the events. If missing or invalid, a trace begins.",
        "schema": {"type": "string", "examples": ["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"]},
        **_NOT_FILLED,
    },
}

HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {
        "description": "The caller's id, or a new one. Quote it when you report a problem.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"},
        "example": "case-17",
    },
    "WWW-Authenticate": {
        "description": "What is wrong with the token (RFC 6750, section 3).",
        "schema": {"type": "string", "pattern": "^Bearer "},
        "example": 'Bearer realm="calculation-requests"',
    },
    idempotency_key_header.REPLAYED: {
        "description": "Present if this request was stored earlier, with the same `Idempotency-Key`.",
        "schema": {"type": "string", "const": "true"},
    },
    "ETag": {
        "description": "Changes when the questions change.",
        "schema": {"type": "string", "pattern": '^W/"'},
    },
    "Cache-Control": {
        "description": "The caller may cache the answer, and must revalidate it each time.",
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "Seconds to wait before the next attempt.",
        "schema": {"type": "integer", "minimum": 1},
        "example": 1,
    },
}
