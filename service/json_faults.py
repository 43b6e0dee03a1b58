"""Describes msgspec's errors in terms of JSON, without quoting the input."""

import json
import re
from typing import Any

import msgspec

# The errors that reading malformed or unexpected input raises.
UNREADABLE = (msgspec.DecodeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError)

_TYPES = (
    {"str": "a string", "int": "an integer", "float": "a number", "bool": "a boolean"}
    | {"object": "an object", "array": "an array", "uuid": "a UUID"}
    | {"date": "a date", "datetime": "a time with its date", "decimal": "a decimal number"}
)
_QUOTED_TYPES = re.compile(r"`([^`]+)`")
NOT_ALLOWED = "This value is not allowed"
# Messages that quote the value, or our pattern for it.
_QUOTING = re.compile(r"(Invalid (enum )?value|Expected `str` matching) .*", re.DOTALL)


def _refuse_repeats(members: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in members}) < len(members):
        raise msgspec.DecodeError("it repeats a name within an object")


# Raises one of UNREADABLE if an object repeats a name: msgspec takes the last member with that name. Numbers
# are not converted, because long ones take long.
check_names = json.JSONDecoder(object_pairs_hook=_refuse_repeats, parse_int=str, parse_float=str).decode


def why_unreadable(text: bytes, error: Exception) -> str:
    """Return why *text* is not JSON and, if known, the byte at which reading stopped."""
    reasons = {
        "it is empty": not text.strip(),
        "it begins with a byte order mark, which JSON must not have": text.startswith(b"\xef\xbb\xbf"),
        # UTF-16 and UTF-32 have a zero there.
        "it is not UTF-8": isinstance(error, UnicodeDecodeError) or b"\0" in text[:4],
        "it nests too deeply": isinstance(error, RecursionError),
        "a number is too large": isinstance(error, msgspec.ValidationError),
        f"it ends too early (byte {len(text)})": str(error) == "Input data was truncated",
        str(error).removeprefix("JSON is malformed: "): True,
    }
    return next(reason for reason, applies in reasons.items() if applies)


def describe(error: msgspec.ValidationError) -> str:
    """Return what is wrong and in which field, such as `data.calculation_id`, but never the value."""
    # The last mark begins the path. What comes before it may quote the value, whatever that contains.
    problem, mark, path = str(error).rpartition(" - at `$")
    if not mark:
        problem, path = path, ""
    field = path.rstrip("`").removeprefix(".")
    reason = _QUOTED_TYPES.sub(
        lambda types: " or ".join(_TYPES.get(name, name) for name in types[1].split(" | ")),
        _QUOTING.sub(NOT_ALLOWED, problem),
    )
    return f"{field}: {reason}" if field else reason
