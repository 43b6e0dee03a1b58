"""What msgspec finds wrong with JSON, in the words of JSON, and without quoting any of it."""

import re
from functools import lru_cache

import msgspec

# What msgspec raises for input that is not what was asked for.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_TYPES = {"str": "a string", "int": "an integer", "float": "a number", "bool": "a boolean"} | {
    "object": "an object",
    "array": "an array",
}
_QUOTED_TYPES = re.compile(r"`([^`]+)`")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_OF_FIELD = re.compile(r"(\w+): (.*)", re.DOTALL)  # the words of our own checks
_OUR_WORDS = (
    (re.compile(r"Invalid (enum )?value .*", re.DOTALL), "This value is not allowed"),
    (re.compile(r"Expected `str` matching .*", re.DOTALL), "Expected the form in the AsyncAPI document"),
    (re.compile(r"Expected `str` of length >= (\d+)"), r"Expected a string of \1 or more characters"),
    (re.compile(r"Expected `str` of length <= (\d+)"), r"Expected a string of at most \1 characters"),
)


def why_unreadable(text: bytes, error: Exception) -> str:
    """Return why *text* is not JSON and, if known, the byte at which reading stopped."""
    if not text.strip():
        return "it is empty"
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {_first_not_utf8(text)})"
    if isinstance(error, msgspec.ValidationError):
        return "a number is too large"
    if str(error) == "Input data was truncated":
        return f"it ends too early (byte {len(text)})"
    return str(error).removeprefix("JSON is malformed: ")


def _first_not_utf8(text: bytes) -> int:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(text)


@lru_cache(maxsize=256)  # It took half of the time of a refusal.
def in_json_words(problem: str) -> str:
    """Return a problem as msgspec reports it, with the types of JSON in place of Python's."""
    return _QUOTED_TYPES.sub(
        lambda types: " or ".join(_TYPES.get(name, name) for name in types[1].split(" | ")), problem
    )


def locate(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the field at fault, such as `data.calculation_id`, and what is wrong with it: never its value.

    The field is "" if the whole is at fault.
    """
    problem, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").removeprefix(".")
    if missing := _MISSING.fullmatch(problem):
        return f"{field}.{missing[1]}".removeprefix("."), "missing"
    if checked := _OF_FIELD.fullmatch(problem):
        return f"{field}.{checked[1]}".removeprefix("."), checked[2]
    for theirs, ours in _OUR_WORDS:
        if found := theirs.fullmatch(problem):
            return field, found.expand(ours)
    return field, in_json_words(problem)
