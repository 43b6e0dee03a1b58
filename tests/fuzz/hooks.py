"""What Schemathesis cannot know about the API."""

import re
from typing import Any
from uuid import uuid4

import schemathesis

from service import text_rules
from service.api import idempotency_key_header
from service.api.listing import filters_in

_KEY = "Idempotency-Key"


@schemathesis.hook
def before_call(_: schemathesis.HookContext, case: "schemathesis.Case[Any]", __: dict[str, Any]) -> None:
    """Avoid valid calls that the API refuses: a used key with another body, and made-up cursors."""
    if case.headers and re.fullmatch(idempotency_key_header.PATTERN, str(case.headers.get(_KEY, ""))):
        case.headers[_KEY] = str(uuid4())
    if case.query and case.meta and case.meta.generation.mode.is_positive:
        case.query.pop("after", None)  # It names the server.
        # No made-up cursor has the filter's checksum.
        if "-" in str(case.query.get("cursor", "")) or filters_in(case.query):
            case.query.pop("cursor", None)


@schemathesis.hook
def filter_body(_: schemathesis.HookContext, body: Any) -> bool:
    """Leave out reasons that are not texts. Without a waiver the API accepts them, unlike the document."""
    return not isinstance(body, dict) or isinstance(body.get("calculation_fee_exempt_reason"), str | None)


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Correct what the API rejects although no schema can say so, so that a valid body is accepted."""
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("meta_data"), dict):
        body = body | {"meta_data": mend_json(body["meta_data"])}
    return map_query(context, body)


@schemathesis.hook
def map_query(_: schemathesis.HookContext, query: Any) -> Any:
    """Correct a query as `map_body` does a body."""
    return {name: mend(value) if isinstance(value, str) else value for name, value in (query or {}).items()}


def mend(text: str) -> str:
    """Replace the characters that the schemas' patterns cannot exclude, and make a blank text visible."""
    text = "".join(each if each.isascii() or not text_rules.check_line(each) else "x" for each in text)
    return f"{text}x" if text and text_rules.is_blank(text) else text


def mend_json(value: Any) -> Any:
    """Remove NUL characters and large numbers, at every depth."""
    if isinstance(value, dict):
        return {mend_json(name): mend_json(part) for name, part in value.items()}
    if isinstance(value, list):
        return [mend_json(part) for part in value]
    if isinstance(value, str):
        return value.replace("\0", "")
    return value if not isinstance(value, int | float) or abs(value) < 2**63 else 0
