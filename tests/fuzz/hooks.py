"""What Schemathesis cannot know about the API."""

import re
from typing import Any
from uuid import uuid4

import schemathesis

from service import text_rules
from service.api import idempotency_key_header

_KEY = "Idempotency-Key"


@schemathesis.hook
def before_call(_: schemathesis.HookContext, case: "schemathesis.Case[Any]", __: dict[str, Any]) -> None:
    """Use each valid key once: the API refuses the same key with another body."""
    if case.headers and re.fullmatch(idempotency_key_header.PATTERN, str(case.headers.get(_KEY, ""))):
        case.headers[_KEY] = str(uuid4())


@schemathesis.hook
def filter_body(_: schemathesis.HookContext, body: Any) -> bool:
    """Leave out names whose only characters are invisible and beyond U+FFFF, which no pattern can exclude."""
    texts = [value for value in body.values() if isinstance(value, str)] if isinstance(body, dict) else []
    return not any(text.strip() and not text.isascii() and text_rules.is_blank(text) for text in texts)
