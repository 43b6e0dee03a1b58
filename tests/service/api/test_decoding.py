"""Any struct can be a body: its decoding, errors and schema follow from its annotations."""

from datetime import date
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import UNSET, Meta, UnsetType

from service.api.decoding import Sent, parse
from service.api.envelope import ErrorCode, FieldError
from service.api.errors import InvalidSubmission


class EveryType(Sent, frozen=True, kw_only=True):
    """A field of each type that the API takes, of some others, and of unions with null and UNSET."""

    a_str: Annotated[str, Meta(min_length=1, max_length=5)] | UnsetType = UNSET
    an_int: Annotated[int, Meta(ge=0, multiple_of=5)] | UnsetType = UNSET
    a_float: Annotated[float, Meta(lt=1)] | UnsetType = UNSET
    a_bool: bool | UnsetType = UNSET
    a_date: date | UnsetType | None = UNSET
    a_literal: Literal["a", "b"] | UnsetType | None = UNSET
    a_list: Annotated[list[int], Meta(max_length=2)] | UnsetType = UNSET
    a_raw: msgspec.Raw | UnsetType = UNSET
    a_union: int | str | UnsetType | None = UNSET


# For each field a valid value in JSON, and what other values are refused for.
VALID = {
    "a_str": "abc",
    "an_int": 5,
    "a_float": 0.5,
    "a_bool": True,
    "a_date": "2026-03-02",
    "a_literal": "a",
    "a_list": [1],
    "a_raw": {"a": [1]},
    "a_union": "x",
}
REFUSED: list[tuple[str, Any, ErrorCode, str]] = [
    ("a_str", None, "invalid_type", "Expected a string, got null."),
    ("a_str", "zqmark", "too_long", "Expected at most 5 characters, got 6."),
    ("a_str", "", "out_of_range", "Expected a string of length >= 1."),
    ("an_int", 1.5, "invalid_type", "Expected an integer, got a number."),
    ("an_int", True, "invalid_type", "Expected an integer, got a boolean."),
    ("an_int", -1, "out_of_range", "Expected an integer >= 0."),
    ("an_int", 7, "out_of_range", "Expected an integer that's a multiple of 5."),
    ("a_float", 1.5, "out_of_range", "Expected a number < 1.0."),
    ("a_bool", 1, "invalid_type", "Expected a boolean, got an integer."),
    ("a_date", "zqmark", "invalid_type", "Invalid RFC3339 encoded date."),
    ("a_date", 1, "invalid_type", "Expected a date or null, got an integer."),
    ("a_literal", "zqmark", "invalid_choice", "Expected a or b."),
    ("a_list", {}, "invalid_type", "Expected an array, got an object."),
    ("a_list", [1, 2, 3], "out_of_range", "Expected an array of length <= 2."),
    ("a_union", [], "invalid_type", "Expected an integer or a string or null, got an array."),
    ("zqmark", 1, "unknown_field", "There is no such field: check its name."),
]


def refusals(kind: type[Sent], body: object) -> list[FieldError]:
    with pytest.raises(InvalidSubmission) as refusal:
        parse(kind, msgspec.json.encode(body))
    return refusal.value.errors


def test_every_type_is_decoded_and_a_field_that_is_left_out_is_unset():
    parsed = parse(EveryType, msgspec.json.encode(VALID))

    assert VALID.keys() == set(EveryType.__struct_fields__)
    assert msgspec.json.decode(msgspec.json.encode(parsed)) == VALID
    assert parse(EveryType, b"{}") == EveryType()


@pytest.mark.parametrize(("name", "value", "code", "message"), REFUSED, ids=ascii)
def test_field_of_any_type_is_refused_in_the_words_of_json_beside_others(name, value, code, message):
    expected = FieldError(code, message, name, f"/{name}")
    other = FieldError("invalid_type", "Expected a boolean, got a string.", "a_bool", "/a_bool")

    assert refusals(EveryType, VALID | {name: value}) == [expected]
    if name != "a_bool":
        found = refusals(EveryType, VALID | {name: value, "a_bool": "zqmark"})
        assert sorted(found, key=str) == sorted([expected, other], key=str)
