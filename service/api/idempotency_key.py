"""The Idempotency-Key header (draft-ietf-httpapi-idempotency-key-header)."""

import re
from collections.abc import Sequence

REPLAYED = "Idempotent-Replayed"  # the header of an answer to a repeat
# A string of RFC 8941 (section 3.3.3) without escapes; or a token, which unlike those of RFC 8941 may begin
# with a digit, as many UUIDs do. A token has no comma: two headers joined by one are not one key.
PATTERN = r"""^("[ !#-\[\]-~]{1,255}"|[A-Za-z0-9!#$%&'*+.^_`|~:/-]{1,255})$"""

_KEY = re.compile(PATTERN)


class MalformedIdempotencyKey(Exception):
    """Idempotency-Key must be 1 to 255 letters, digits or hyphens, or a text with spaces in double quotes."""


def parse_key(values: Sequence[str]) -> str | None:
    """Return the key in the header's *values*, or None without the header. Raises MalformedIdempotencyKey.

    `"a"` and `a` are the same key: RFC 8941 requires the quotes, and many callers leave them out.
    """
    if not values:
        return None
    value = values[0].strip(" \t")
    if len(values) > 1 or not _KEY.fullmatch(value):
        raise MalformedIdempotencyKey
    return value.strip('"')
