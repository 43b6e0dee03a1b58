"""What Schemathesis cannot know of the API."""

import re
from typing import Any
from uuid import uuid4

import schemathesis

from service.calculation_requests import idempotency

_KEY = "Idempotency-Key"


@schemathesis.hook
def before_call(_: schemathesis.HookContext, case: "schemathesis.Case[Any]", __: dict[str, Any]) -> None:
    """Use each good key once: the same key with another body is rightly refused."""
    if case.headers and re.fullmatch(idempotency.PATTERN, str(case.headers.get(_KEY, ""))):
        case.headers[_KEY] = str(uuid4())
