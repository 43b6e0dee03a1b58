"""The body of a create: which values are accepted, and why the others are refused, all of them at once."""

import json
import unicodedata
from typing import Any

import msgspec
import pytest

from service.api.bodies import CreateBody
from service.api.decoding import parse
from service.api.envelope import FieldError
from service.api.errors import ApiError, InvalidSubmission
from service.calculation_requests.field_docs import META_DATA_DEPTH
from tests.harness.documented_errors import is_documented
from tests.harness.examples import A_REQUEST

_FIELDS = msgspec.json.encode(A_REQUEST)
_MARK = "zqmark"  # must not be quoted
_REPEATS = "it repeats a name within an object"
_REASON = "calculation_fee_exempt_reason"
# A body whose rest is valid: a reason is decoded after it.
_WITH_REASON = b'{"calculation_fee_exempt":true,"calculation_fee_exempt_reason":%s,' + _FIELDS[1:]
_CHARACTERS = "Control, line-separator and bidirectional characters are not allowed: remove or replace "
_NO_NUL = "NUL characters are not allowed."
_WHOLE_ADDRESS = "Expected an address such as ada@example.com: a name, an @ and a domain."
_UNSEEN = "An e-mail address has no spaces and no invisible characters: remove "
_DOMAIN = "The domain after the @ is incomplete or invalid."
_LOCAL_PART = "The part before the @ is malformed, too long or not ASCII."
_INT64 = "Numbers must be within the range of 64-bit integers."


def accepted(**fields: Any) -> dict[str, Any]:
    """Return the columns of a request with these fields, whose waiver applies if it has one."""
    parsed = parse(CreateBody, msgspec.json.encode(A_REQUEST | fields))
    return parsed.validated(waiver_applies=parsed.calculation_fee_exempt)


def refusals(body: bytes) -> list[FieldError]:
    """Return the errors of a body whose waiver applies."""
    with pytest.raises(InvalidSubmission) as refusal:
        parse(CreateBody, body).validated(waiver_applies=True)
    return refusal.value.errors


def refused(**fields: Any) -> set[tuple[str | None, str, str]]:
    """Return (field, code, message) of every error of a request with these fields."""
    errors = refusals(msgspec.json.encode(A_REQUEST | fields))
    return {(error.field, error.code, error.message) for error in errors}


@pytest.mark.parametrize("name", A_REQUEST)
def test_required_field_must_be_there_and_not_blank(name):
    without = {key: value for key, value in A_REQUEST.items() if key != name}

    missing = FieldError("required", "This field is required.", name, f"/{name}")
    assert refusals(json.dumps(without).encode()) == [missing]
    assert refused(**{name: " \u2003 "}) == {(name, "blank", "This field must not be blank.")}


@pytest.mark.parametrize(
    "invisible",
    [
        *("\u200b", "\u3164", "\u2800", "\u00ad", "\u2060", "\ufe0f", "\U000e0100", "\U000e0041"),
        *("\u0301", "\u20dd", "\u115f", "\uffa0", "\ufeff", "\u034f", "\u180e", "\ufff9"),
        *("\u200d\u200c", " \u200b\u3000\u0301"),
    ],
    ids=ascii,
)
def test_text_without_a_visible_character_is_blank(invisible):
    names = [*(name for name in A_REQUEST if not name.endswith("_email")), _REASON]
    fields = dict.fromkeys(names, invisible) | {"calculation_fee_exempt": True}

    assert {(name, code) for name, code, _ in refused(**fields)} == {(name, "blank") for name in names}


def test_no_control_separator_or_bidirectional_character_is_accepted_in_a_line():
    embeddings = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    forbidden = [
        character
        for character in map(chr, range(0x10000))
        if unicodedata.category(character) in {"Cc", "Zl", "Zp"}
        or unicodedata.bidirectional(character) in embeddings
    ]

    for character in (*forbidden, "\u061c", "\u200e", "\u200f"):
        assert {code for _, code, _ in refused(case_ref=f"a{character}b")} == {"invalid_characters"}


@pytest.mark.parametrize(
    ("name", "value", "code", "message"),
    [
        ("property_value", -1, "out_of_range", "Expected an integer >= 0."),
        ("property_value", 10**12 + 1, "out_of_range", "Expected an integer <= 1000000000000."),
        ("case_ref", {_MARK: 1}, "invalid_type", "Expected a string, got an object."),
        ("request_type", _MARK, "invalid_choice", "Expected SDLT_CALCULATION."),
        (
            "customer_email",
            "ada@example.com\r\nBcc: eve@example.com",
            "invalid_characters",
            f"{_CHARACTERS}U+000D.",
        ),
        ("customer_last_name", "Love\x00lace", "invalid_characters", f"{_CHARACTERS}U+0000."),
        ("case_ref", "12\u2028High Street", "invalid_characters", f"{_CHARACTERS}U+2028 LINE SEPARATOR."),
        ("customer_phone", "+44\u200e", "invalid_characters", f"{_CHARACTERS}U+200E LEFT-TO-RIGHT MARK."),
        ("notes", "a\x00b", "invalid_characters", _NO_NUL),
        ("meta_data", {"a\x00b": 1}, "invalid_characters", _NO_NUL),
        ("meta_data", {"a": 2**63}, "out_of_range", _INT64),
        ("meta_data", {"a": [-1e300]}, "out_of_range", _INT64),
        ("meta_data", {"a": "x" * 16_377}, "too_long", "Expected at most 16384 bytes of JSON, got 16385."),
        ("customer_first_name", "x" * 256, "too_long", "Expected at most 255 characters, got 256."),
        ("customer_phone", "1" * 33, "too_long", "Expected at most 32 characters, got 33."),
        ("customer_email", "a" * 250 + "@x.co", "too_long", "Expected at most 254 characters, got 255."),
        ("notes", "x" * 10_001, "too_long", "Expected at most 10000 characters, got 10001."),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_field_is_refused_in_the_words_of_json(name, value, code, message):
    assert refused(**{name: value}) == {(name, code, message)}
    assert is_documented(422, code, message)
    assert _MARK not in message


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("Ada <ada@example.com>", "Expected the address alone, without a name or angle brackets."),
        ("ada@example.com, eve@example.com", "Expected one address, not several."),
        ("ada@example.com;eve", "Expected one address, not several."),
        ("ada@eve@example.com", "Expected one address, not several."),
        ("ada@example.com ", f"{_UNSEEN}U+0020 SPACE."),
        ("ada\u200b@example.com", f"{_UNSEEN}U+200B ZERO WIDTH SPACE."),
        *((address, _WHOLE_ADDRESS) for address in ("ada", "ada@", "@example.com", "example.com")),
        *((f"ada@{domain}", _DOMAIN) for domain in ("example", "example..com", "-a.com", "=?a?=.com")),
        *(
            (f"{name}@example.com", _LOCAL_PART)
            for name in ("a..b", "é", "e\u0301", "a" * 65, "=?utf-8?q?a?=", '"a')
        ),
    ],
)
def test_error_says_what_is_wrong_with_an_address(address, message):
    assert refused(sender_email=address) == {("sender_email", "invalid_email", message)}
    assert is_documented(422, "invalid_email", message)


def test_errors_are_in_the_order_of_the_fields_and_unknown_fields_are_last():
    body = {_MARK: 1, _REASON: 7, "calculation_fee_exempt": True, "notes": 7, "customer_email": "ada"}

    names = [error.field for error in refusals(json.dumps(body).encode())]

    assert names == [*A_REQUEST, "notes", _REASON, _MARK]


@pytest.mark.parametrize("levels", [META_DATA_DEPTH + 1, 41, 901])
def test_meta_data_is_refused_with_the_number_of_its_levels(levels):
    nested: Any = {"a": 1}
    for _ in range(levels // 2):
        nested = {"a": [nested], "b": 2**64}

    message = f"Expected at most 16 levels of nesting, got {levels}."
    assert refused(meta_data=nested) == {("meta_data", "too_deep", message)}


@pytest.mark.parametrize(
    ("reason", "code", "message"),
    [
        (None, "required", "This field is required when calculation_fee_exempt is true."),
        (" ", "blank", "This field must not be blank."),
        ("x" * 501, "too_long", "Expected at most 500 characters, got 501."),
        (7, "invalid_type", "Expected a string."),
    ],
)
def test_waiver_needs_a_reason(reason, code, message):
    fields = {"calculation_fee_exempt": True, _REASON: reason}

    assert refused(**fields) == {(_REASON, code, message)}
    ignored = parse(CreateBody, msgspec.json.encode(A_REQUEST | fields)).validated(waiver_applies=False)
    assert (ignored["calculation_fee_exempt"], ignored[_REASON]) == (False, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("customer_first_name", "\u0646\u06cc\u200c\u0645\u0627"),  # Persian, with a joiner
        ("customer_last_name", "O'Brien-Łódź 山田"),
        ("sender_first_name", "e\u0301"),
        ("case_ref", "\U0001f3e0\ufe0f"),
        ("case_ref", "Pay at evil.com!"),  # which the e-mail leaves out
        ("notes", "Tabs\tand\r\nlines"),
        ("property_value", 0),
        ("customer_phone", None),
        ("customer_phone", "ask Grace, 9 to 5"),
        ("customer_email", "ada+tag@sub.customer.example.com"),
        ("customer_email", "ada@bücher.example.com"),
    ],
)
def test_good_value_is_stored_unchanged(name, value):
    assert accepted(**{name: value})[name] == value


def test_empty_optional_text_is_stored_as_null():
    texts = dict.fromkeys(("customer_phone", "notes", "external_id"), "")

    assert accepted(**texts) == accepted(**dict.fromkeys(texts))


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        ('{"z":9223372036854775807,"a":-9223372036854775808}', None),
        ('{"m":[1e17,3.0,null,true],"empty":{}}', None),
        ('{"a":[1.10,1E2,0.1234567890123456789]}', '{"a":[1.1,100.0,0.12345678901234568]}'),
    ],
)
def test_meta_data_is_stored_as_it_was_sent_but_for_fractions_and_exponents(sent, stored):
    assert accepted(meta_data=msgspec.Raw(sent.encode()))["meta_data"] == (stored or sent)


def test_integral_number_is_an_integer_in_any_notation():
    assert repr(accepted(property_value=msgspec.Raw(b"3.0e5"))["property_value"]) == "300000"


@pytest.mark.parametrize(
    ("sent", "field", "pointer"),
    [("é" * 256, "é" * 255, "/" + "é" * 255), ("a/b~c", "a/b~c", "/a~1b~0c")],
    ids=["long", "escaped as RFC 6901 requires"],
)
def test_unknown_field_is_named_and_pointed_to(sent, field, pointer):
    (error,) = refusals(json.dumps(A_REQUEST | {sent: 1}).encode())

    assert (error.code, error.field, error.pointer) == ("unknown_field", field, pointer)


@pytest.mark.parametrize("body", [b"[]", b'"text"', b"null", b"7"])
def test_body_that_is_not_an_object_is_refused_as_a_whole(body):
    assert refusals(body) == [FieldError("invalid_type", "The body must be a JSON object.", None, "")]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "it is empty"),
        (b'{"a": zqmark}', "invalid character (byte 6)"),
        (b'{"a": 1} zqmark', "trailing characters (byte 10)"),
        (b'{"a": "zqmark', "it ends too early (byte 13)"),
        (b'{"a": "zqmark\xff"}', "it is not UTF-8"),
        (_FIELDS.decode().encode("utf-8-sig"), "it begins with a byte order mark, which JSON must not have"),
        (_FIELDS.decode().encode("utf-16"), "it is not UTF-8"),
        (b'{"a": 1e999999, "b": "zqmark"}', "a number is too large"),
        (b"[" * 100_000, "it nests too deeply"),
        (b'{"notes": "zqmark",' + _FIELDS[1:-1] + b',"notes": "b"}', _REPEATS),
        # msgspec takes 3.0 for no integer, so this body is read another way.
        (b'{"property_value": 3.0, "notes": "zqmark",' + _FIELDS[1:-1] + b',"notes": "b"}', _REPEATS),
        (_WITH_REASON % b'"zqmark\\q"', "invalid escaped character (byte 71)"),
        (_WITH_REASON % b"1e999999", "a number is too large"),
    ],
)
def test_malformed_body_is_refused_with_the_reason_and_the_position(body, reason):
    with pytest.raises(ApiError) as refusal:
        parse(CreateBody, body)

    assert str(refusal.value) == f"The body is not readable JSON: {reason}."
    assert is_documented(400, "malformed_body", str(refusal.value))
    assert _MARK not in str(refusal.value)
