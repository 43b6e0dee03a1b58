"""The uuid of a calculation request: `req_` and a UUIDv7 as 22 base62 characters, so it sorts by time."""

import re
from functools import lru_cache
from itertools import product
from uuid import UUID

import uuid_utils.compat

new_request_id = uuid_utils.compat.uuid7

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_DIGITS = {character: digit for digit, character in enumerate(_ALPHABET)}
_PAIRS = ["".join(pair) for pair in product(_ALPHABET, repeat=2)]  # Two digits at a time take half as long.
_WIDTH = 22
_SHAPE = re.compile(rf"req_[0-9A-Za-z]{{{_WIDTH}}}", re.ASCII)


@lru_cache(maxsize=128)  # While an HTTP request is served, its uuid is needed up to four times.
def uuid_of(request_id: UUID) -> str:
    """Return the `req_…` form that callers and customers see."""
    number = request_id.int
    pairs = []
    for _ in range(_WIDTH // 2):
        number, pair = divmod(number, len(_PAIRS))
        pairs.append(_PAIRS[pair])
    return "req_" + "".join(reversed(pairs))


def parse_uuid(text: str) -> UUID | None:
    """Return the id whose `req_…` form is *text*, or None if *text* is malformed."""
    if not _SHAPE.fullmatch(text):
        return None
    number = 0
    for character in text[4:]:
        number = number * 62 + _DIGITS[character]
    return UUID(int=number) if number < 2**128 else None
