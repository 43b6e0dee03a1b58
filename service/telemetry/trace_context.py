"""Reads the traceparent of a message (W3C Trace Context)."""

import re
from collections.abc import Mapping

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent(headers: Mapping[str, str]) -> str | None:
    """Return the traceparent (section 3.2), or None if it is missing or malformed."""
    value = headers.get("traceparent", "")
    return value if _TRACEPARENT.fullmatch(value) else None
