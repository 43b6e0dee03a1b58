"""The Idempotency-Key header (draft-ietf-httpapi-idempotency-key-header)."""

import re
from collections.abc import Sequence

REPLAYED = "Idempotent-Replayed"  # the header of an answer to a repeat
# A string of RFC 8941 (section 3.3.3) without escapes; or a token, which unlike those of RFC 8941 may begin
# with a digit, as many UUIDs do. A token has no comma: two headers joined by one are not one key.
PATTERN = r"""^("[ !#-\[\]-~]{1,255}"|[A-Za-z0-9!#$%&'*+.^_`|~:/-]{1,255})$"""

_KEY = re.compile(PATTERN)
_LONGEST = 255


class MalformedIdempotencyKey(Exception):
    """The key has characters that are not accepted, or none."""


class IdempotencyKeyTooLong(Exception):
    """The key has too many characters."""

    def __init__(self, characters: int) -> None:
        super().__init__(f"The Idempotency-Key has {characters} characters: at most {_LONGEST} are accepted.")


class RepeatedIdempotencyKey(Exception):
    """There is more than one Idempotency-Key header."""


def parse_key(values: Sequence[str]) -> str | None:
    """Return the key in the header's *values*, or None without the header.

    Raises RepeatedIdempotencyKey, IdempotencyKeyTooLong or MalformedIdempotencyKey.

    `"a"` and `a` are the same key: RFC 8941 requires the quotes, and many callers leave them out.
    """
    if not values:
        return None
    if len(values) > 1:
        raise RepeatedIdempotencyKey
    value = values[0].strip(" \t")
    key = value.strip('"')
    if len(key) > _LONGEST:
        raise IdempotencyKeyTooLong(len(key))
    if not _KEY.fullmatch(value):
        raise MalformedIdempotencyKey
    return key
