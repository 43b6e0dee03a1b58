"""The Idempotency-Key header (draft-ietf-httpapi-idempotency-key-header): a repeat is known by its key."""

import re
from collections.abc import Sequence

import msgspec

KEY_CHARACTERS = 255
REPLAYED = "Idempotent-Replayed"  # the header of an answer that was given before

# A string of RFC 8941, section 3.3.3; or a token, which unlike theirs may begin with any of its characters:
# many UUIDs begin with a digit.
_QUOTED = r'"((?:[ !#-\[\]-~]|\\["\\])+)"'
_BARE = r"[A-Za-z0-9!#$%&'*+.^_`|~:/-]+"
PATTERN = f"^({_QUOTED}|{_BARE})$"
_STRING, _TOKEN = re.compile(_QUOTED), re.compile(_BARE)
_ESCAPED = re.compile(r"\\(.)")


class MalformedIdempotencyKey(Exception):
    """Idempotency-Key must be one string or token (RFC 8941) of 1 to 255 characters."""


class IdempotencyKeyReused(Exception):
    """This Idempotency-Key came with another body before."""


class IdempotencyKeyInFlight(Exception):
    """A request with this Idempotency-Key is being stored: ask again."""


class Idempotency(msgspec.Struct, frozen=True):
    """What tells a repeat from another request: the caller's key, and the SHA-256 of what was submitted."""

    key: str
    sha256: bytes
    wait_seconds: float  # for a request with the same key that is being stored

    @property
    def lock_timeout(self) -> str:
        """The wait as Postgres writes it; zero would be for ever."""
        return f"{max(1, round(self.wait_seconds * 1000))}ms"


def parse_key(values: Sequence[str]) -> str | None:
    """Return the key in the header's *values*, None when there is none. Raises MalformedIdempotencyKey."""
    if not values:
        return None
    key = _read(values[0].strip(" \t")) if len(values) == 1 else ""
    if not 0 < len(key) <= KEY_CHARACTERS:
        raise MalformedIdempotencyKey
    return key


def _read(value: str) -> str:
    """Return the key behind a string or token, and "" when it is neither: `"a"` and `a` are the same key."""
    if quoted := _STRING.fullmatch(value):
        return _ESCAPED.sub(r"\1", quoted[1])
    return value if _TOKEN.fullmatch(value) else ""
