"""Bodies: which values are accepted, and why the others are refused, all of them at once."""

import json
import re
import time
import unicodedata
from itertools import product
from typing import Any

import email_validator
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from service.api.bodies import CreateBody
from service.api.decoding import parse
from service.api.envelope import FieldError
from service.api.errors import ApiError, InvalidSubmission
from service.calculation_requests import email_addresses
from service.calculation_requests.field_docs import META_DATA_DEPTH
from tests.harness.examples import A_REQUEST
from tests.harness.http import is_documented

_FIELDS = msgspec.json.encode(A_REQUEST)
_MARK = "zqmark"  # must not be quoted
_REPEATS = "it repeats a name within an object"
_FEE, _REASON = "calculation_fee_exempt", "calculation_fee_exempt_reason"
# A body whose rest is valid: a reason is decoded after it.
_WITH_REASON = b'{"calculation_fee_exempt":true,"calculation_fee_exempt_reason":%s,' + _FIELDS[1:]
_BLANK = "This field must not be blank."
_CHARACTERS = "Control, line-separator and bidirectional characters are not allowed: remove or replace "
_UNSEEN = "An e-mail address has no spaces and no invisible characters: remove "
_EMAIL = ("sender_email", "invalid_email")
_WHOLE = "Expected an address such as ada@example.com: a name, an @ and a domain."
_DOMAIN = "The domain after the @ is incomplete or invalid."
_LOCAL = "The part before the @ is malformed, too long or not ASCII."
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


def test_required_field_must_be_there():
    for name in A_REQUEST:
        without = {key: value for key, value in A_REQUEST.items() if key != name}
        missing = FieldError("required", "This field is required.", name, f"/{name}")
        assert refusals(json.dumps(without).encode()) == [missing]


def test_text_without_a_visible_character_is_blank():
    names = [*A_REQUEST, _REASON]
    single = "\u200b\u3164\u2800\u00ad\u2060\ufe0f\U000e0100\U000e0041"
    more = "\u0301\u20dd\u115f\uffa0\ufeff\u034f\u180e\ufff9"
    for invisible in (*single, *more, "\u200d\u200c", " \u200b\u3000\u0301", " \u2003 "):
        errors = refused(**dict.fromkeys(names, invisible), calculation_fee_exempt=True)
        assert errors == {(name, "blank", _BLANK) for name in names}, ascii(invisible)


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
    ("name", "code", "message", "values"),
    [
        ("property_value", "out_of_range", "Expected an integer >= 0.", [-1]),
        ("property_value", "out_of_range", "Expected an integer <= 1000000000000.", [10**12 + 1]),
        ("property_value", "invalid_type", "Expected an integer or null, got a number.", [1.5]),
        ("property_value", "invalid_type", "Expected an integer or null, got a boolean.", [True]),
        ("case_ref", "invalid_type", "Expected a string, got an object.", [{_MARK: 1}]),
        ("case_ref", "invalid_type", "Expected a string, got null.", [None]),
        (_FEE, "invalid_type", "Expected a boolean, got an integer.", [1]),
        ("meta_data", "invalid_type", "Expected an object or null, got an array.", [[]]),
        ("request_type", "invalid_choice", "Expected SDLT_CALCULATION.", [_MARK]),
        ("customer_email", "invalid_characters", f"{_CHARACTERS}U+000D.", ["a@b.test\r\nBcc: c@d.test"]),
        ("customer_last_name", "invalid_characters", f"{_CHARACTERS}U+0000.", ["Love\x00lace"]),
        ("case_ref", "invalid_characters", f"{_CHARACTERS}U+2028 LINE SEPARATOR.", ["12\u2028High Street"]),
        ("customer_phone", "invalid_characters", f"{_CHARACTERS}U+200E LEFT-TO-RIGHT MARK.", ["+44\u200e"]),
        ("notes", "invalid_characters", "NUL characters are not allowed.", ["a\x00b"]),
        ("meta_data", "invalid_characters", "NUL characters are not allowed.", [{"a\x00b": 1}]),
        ("meta_data", "out_of_range", _INT64, [{"a": 2**63}, {"a": [-1e300]}]),
        ("meta_data", "too_long", "Expected at most 16384 bytes of JSON, got 16385.", [{"a": "x" * 16_377}]),
        ("customer_first_name", "too_long", "Expected at most 255 characters, got 256.", ["x" * 256]),
        ("customer_phone", "too_long", "Expected at most 32 characters, got 33.", ["1" * 33]),
        ("customer_email", "too_long", "Expected at most 254 characters, got 255.", ["a" * 250 + "@x.co"]),
        ("notes", "too_long", "Expected at most 10000 characters, got 10001.", ["x" * 10_001]),
        (*_EMAIL, "Expected the address alone, without a name or angle brackets.", ["Ada <ada@example.com>"]),
        (
            *_EMAIL,
            "Expected one address, not several.",
            ["a@b.co, c@d.co", "ada@example.com;eve", "a@b@c.com"],
        ),
        (*_EMAIL, f"{_UNSEEN}U+0020 SPACE.", ["ada@example.com "]),
        (*_EMAIL, f"{_UNSEEN}U+200B ZERO WIDTH SPACE.", ["ada\u200b@example.com"]),
        (*_EMAIL, _WHOLE, ["ada", "ada@", "@example.com", "example.com"]),
        (*_EMAIL, _DOMAIN, ["ada@example", "ada@example..com", "ada@-a.com", "ada@=?a?=.com"]),
        (*_EMAIL, _LOCAL, ["a..b@x.com", "é@x.com", "e\u0301@x.com", "a" * 65 + "@x.com", '"a@x.com']),
        (*_EMAIL, _LOCAL, ["=?utf-8?q?a?=@x.com"]),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_field_is_refused_in_the_words_of_json(name, code, message, values):
    for value in values:
        assert refused(**{name: value}) == {(name, code, message)}
    assert is_documented(422, code, message)
    assert _MARK not in message


def test_errors_are_in_the_order_of_the_fields_and_unknown_fields_are_last():
    body = {_MARK: 1, _REASON: 7, _FEE: True, "notes": 7, "customer_email": "ada"}

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
        (" ", "blank", _BLANK),
        ("x" * 501, "too_long", "Expected at most 500 characters, got 501."),
        (7, "invalid_type", "Expected a string."),
    ],
)
def test_waiver_needs_a_reason(reason, code, message):
    fields = {_FEE: True, _REASON: reason}

    assert refused(**fields) == {(_REASON, code, message)}
    ignored = parse(CreateBody, msgspec.json.encode(A_REQUEST | fields)).validated(waiver_applies=False)
    assert (ignored[_FEE], ignored[_REASON]) == (False, None)


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
        *(("customer_phone", phone) for phone in (None, "ask Grace, 9 to 5")),
        *(("customer_email", f"ada{rest}.example.com") for rest in ("+tag@sub.customer", "@bücher")),
    ],
)
def test_good_value_is_stored_unchanged(name, value):
    assert accepted(**{name: value})[name] == value


def test_empty_text_is_stored_as_null_and_an_integral_number_as_an_integer():
    texts = ("customer_phone", "notes", "external_id")

    assert accepted(**dict.fromkeys(texts, "")) == accepted(**dict.fromkeys(texts))
    assert repr(accepted(property_value=msgspec.Raw(b"3.0e5"))["property_value"]) == "300000"


def test_meta_data_is_stored_as_it_was_sent_but_for_fractions_and_exponents():
    same = ('{"z":9223372036854775807,"a":-9223372036854775808}', '{"m":[1e17,3.0,null,true],"empty":{}}')
    other = {'{"a":[1.10,1E2,0.1234567890123456789]}': '{"a":[1.1,100.0,0.12345678901234568]}'}
    for sent, stored in (dict(zip(same, same, strict=True)) | other).items():
        assert accepted(meta_data=msgspec.Raw(sent.encode()))["meta_data"] == stored


def test_unknown_field_is_pointed_to_as_in_rfc_6901_and_a_body_that_is_no_object_is_refused_as_a_whole():
    for sent, pointer in (("é" * 256, "/" + "é" * 255), ("a/b~c", "/a~1b~0c")):
        (error,) = refusals(json.dumps(A_REQUEST | {sent: 1}).encode())
        assert (error.code, error.field, error.pointer) == ("unknown_field", sent[:255], pointer)
    for body in (b"[]", b'"text"', b"null", b"7"):
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


_PARTS = st.text("ab1.-_+=? \"'<>é(@", max_size=70)
_DOMAINS = [*("example.com", "a.test", "localhost", "1.2.3.4", "a..b", "-a.com", "ab--c.com", "x.é")]
_DOMAINS += ["xn--bcher-kva.example", "\u06f0" * 64 + ".example", "é" * 63 + "\u3002" + "é" * 20 + ".example"]


@given(local=_PARTS, domain=st.sampled_from(_DOMAINS) | _PARTS)
@example(local="a" * 64, domain=".".join(["xn--fiqa" + "a" * 30] * 3) + ".example")
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_address_is_accepted_exactly_if_email_validator_accepts_it(local, domain):
    address = f"{local}@{domain}"
    try:
        email_validator.validate_email(
            address, check_deliverability=False, allow_smtputf8=False, test_environment=True, strict=True
        )
        is_valid = len(address) <= 254 and not re.search(r"=\?.*\?=", address)
    except email_validator.EmailNotValidError:
        is_valid = False

    try:
        is_accepted = bool(accepted(customer_email=address))
    except InvalidSubmission:
        is_accepted = False

    assert is_accepted == is_valid


def test_domain_of_many_digits_is_refused_quickly():
    began = time.process_time()
    for length, digit in product(range(100, 250), "0\u0660\u06f0\u0966"):
        assert email_addresses.find_fault(f"a@{digit * length}.com")
    assert time.process_time() - began < 1.2, "it took up to 20 ms for each"
