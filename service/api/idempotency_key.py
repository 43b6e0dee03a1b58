"""The Idempotency-Key header (draft-ietf-httpapi-idempotency-key-header)."""

import re
from collections.abc import Sequence

REPLAYED = "Idempotent-Replayed"  # the header of an answer that was given before
# A string of RFC 8941, section 3.3.3, without escapes; or a token, which unlike theirs may begin with any of
# its characters: many UUIDs begin with a digit. No comma in a token: it would join two headers into one key.
PATTERN = r"""^("[ !#-\[\]-~]{1,255}"|[A-Za-z0-9!#$%&'*+.^_`|~:/-]{1,255})$"""

_KEY = re.compile(PATTERN)


class MalformedIdempotencyKey(Exception):
    """Idempotency-Key must have 1 to 255 letters, digits or hyphens; in double quotes also spaces."""


def parse_key(values: Sequence[str]) -> str | None:
    """Return the key in the header's *values*, None when there is none. Raises MalformedIdempotencyKey.

    `"a"` and `a` are the same key: RFC 8941 wants the quotes, and many callers leave them out.
    """
    if not values:
        return None
    value = values[0].strip(" \t")
    if len(values) > 1 or not _KEY.fullmatch(value):
        raise MalformedIdempotencyKey
    return value.strip('"')
