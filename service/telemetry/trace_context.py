"""The traceparent of HTTP requests and messages (W3C Trace Context)."""

import re
from collections.abc import Iterable
from random import randbytes

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def accept(value: object) -> str | None:
    """Return *value* if it is a traceparent (section 3.2), else None."""
    return value if isinstance(value, str) and _TRACEPARENT.fullmatch(value) else None


def find(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the traceparent among the headers of an HTTP request, or None if it is missing or malformed."""
    for name, value in headers:
        if name == b"traceparent":
            return accept(value.decode("latin-1"))
    return None


def begin() -> str:
    """Return the traceparent of a new trace. Its flag `sampled` is off: no span of it was exported."""
    digits = randbytes(24).hex()  # noqa: S311 - an id, no secret
    return f"00-{digits[:32]}-{digits[32:]}-00"


def trace_id(traceparent: str) -> str:
    """Return the id of the trace, which is in every log line about a request."""
    return traceparent[3:35]
