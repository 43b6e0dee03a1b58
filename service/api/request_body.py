"""The body of a create: its types, lengths and rules. Every failing field is reported at once."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from itertools import islice
from typing import Annotated, Any, NamedTuple, get_args

import msgspec

from service import json_faults, text_rules
from service.api.envelope import ErrorCode, FieldError
from service.api.errors import ApiError, Failure, InvalidSubmission
from service.calculation_requests import email_addresses, field_docs
from service.calculation_requests.field_docs import META_DATA_BYTES, META_DATA_DEPTH, REASON_CHARACTERS
from service.calculation_requests.model import Idempotency, RequestType

UNKNOWN_FIELDS_NAMED = 50  # Naming thousands would take longer than storing a request.
_INT64 = range(-(2**63), 2**63)

# The patterns in the OpenAPI document. They have no `\u…` escapes, because PCRE2 rejects such escapes, and
# zod's generators replace them by the characters. So the checks below reject more characters.
LINE = {"pattern": r"^[^\x00-\x1f\x7f]*$"}
TEXT = {"pattern": r"^[^\x00]*$"}
_FILLED_LINE = {"minLength": 1, **LINE}
_EMAIL = {"format": "email", "pattern": "^[^@]{1,64}@[^@]+$"}


class CheckedBy(NamedTuple):
    """The part of an Annotated type that checks what msgspec cannot."""

    run: Callable[[Any], Failure | None]


def _check_text(value: str) -> Failure | None:
    return ("invalid_characters", "NUL characters are not allowed.") if "\0" in value else None


def _check_email(value: str) -> Failure | None:
    if failure := text_rules.check_filled_line(value):
        return failure
    fault = email_addresses.find_fault(value)
    return ("invalid_email", fault) if fault else None


def _check_meta_data(value: dict[str, Any]) -> Failure | None:
    with suppress(RecursionError):  # A value too deep to encode is rejected below.
        size = len(msgspec.json.encode(value))  # First, because a large value takes long to check.
        if size > META_DATA_BYTES:
            return "too_long", f"Expected at most {META_DATA_BYTES} bytes of JSON, got {size}."
    failure, levels = None, 0
    level: list[Any] = [value]
    while level:
        levels += 1
        parts = [part for each in level for part in ([*each, *each.values()] if type(each) is dict else each)]
        failure = failure or next(filter(None, map(_check_in_meta_data, parts)), None)
        level = [part for part in parts if type(part) is dict or type(part) is list]
    if levels > META_DATA_DEPTH:
        return "too_deep", f"Expected at most {META_DATA_DEPTH} levels of nesting, got {levels}."
    return failure


def _check_in_meta_data(value: Any) -> Failure | None:  # noqa: ANN401 - any JSON value
    if isinstance(value, str):
        return _check_text(value)
    if isinstance(value, int | float) and not _INT64[0] <= value <= _INT64[-1]:
        return "out_of_range", "Numbers must be within the range of 64-bit integers."
    return None


def _at_most(characters: int, schema: dict[str, Any]) -> msgspec.Meta:
    return msgspec.Meta(max_length=characters, extra_json_schema=schema)


# Where null is allowed, sending null means the same as leaving the field out.
Name = Annotated[str, _at_most(text_rules.CHARACTERS, _FILLED_LINE), CheckedBy(text_rules.check_filled_line)]
EmailAddress = Annotated[str, _at_most(email_addresses.LONGEST, _EMAIL), CheckedBy(_check_email)]
PhoneNumber = Annotated[str, _at_most(32, LINE), CheckedBy(text_rules.check_line)]
ExternalId = Annotated[str, _at_most(text_rules.CHARACTERS, LINE), CheckedBy(text_rules.check_line)]
Notes = Annotated[str, _at_most(10_000, TEXT), CheckedBy(_check_text)]
Pounds = Annotated[int, msgspec.Meta(ge=0, le=10**12, extra_json_schema={"format": "int64"})]
MetaData = Annotated[dict[str, Any], CheckedBy(_check_meta_data)]


class CreateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a create request.

    A required text must contain a visible character. No text may contain NUL. `notes` and
    `calculation_fee_exempt_reason` may have several lines. The other texts must not contain control,
    line-separator or bidirectional characters.
    """

    customer_email: Annotated[EmailAddress, field_docs.CUSTOMER_EMAIL]
    customer_phone: Annotated[PhoneNumber | None, field_docs.CUSTOMER_PHONE] = None
    customer_first_name: Annotated[Name, field_docs.CUSTOMER_FIRST_NAME]
    customer_last_name: Annotated[Name, field_docs.CUSTOMER_LAST_NAME]
    sender_email: Annotated[EmailAddress, field_docs.SENDER_EMAIL]
    sender_organization_name: Annotated[Name, field_docs.SENDER_ORGANIZATION_NAME]
    sender_first_name: Annotated[Name, field_docs.SENDER_FIRST_NAME]
    sender_last_name: Annotated[Name, field_docs.SENDER_LAST_NAME]
    case_ref: Annotated[Name, field_docs.CASE_REF]
    request_type: Annotated[RequestType, field_docs.REQUEST_TYPE] = "SDLT_CALCULATION"
    property_value: Annotated[Pounds | None, field_docs.PROPERTY_VALUE] = None
    notes: Annotated[Notes | None, field_docs.NOTES] = None
    external_id: Annotated[ExternalId | None, field_docs.EXTERNAL_ID] = None
    meta_data: Annotated[MetaData | None, field_docs.META_DATA] = None
    calculation_fee_exempt: Annotated[bool, field_docs.CALCULATION_FEE_EXEMPT] = False
    # Any JSON value is accepted, because the reason is ignored unless the fee is waived.
    calculation_fee_exempt_reason: Annotated[
        Any,
        msgspec.Meta(extra_json_schema={"type": ["string", "null"]}),
        field_docs.CALCULATION_FEE_EXEMPT_REASON,
    ] = None


def _parts(annotation: object) -> Iterator[object]:
    """Yield the parts of a type, such as annotations and the types of a union, and the parts of each part."""
    for part in get_args(annotation):
        yield part
        yield from _parts(part)


_decoder = msgspec.json.Decoder(CreateBody)
_fields = {field.name: field for field in msgspec.structs.fields(CreateBody)}
_defaults = {name: field.default for name, field in _fields.items()}
_checks = {
    name: part.run
    for name, field in _fields.items()
    for part in _parts(field.type)
    if isinstance(part, CheckedBy)
}


class ParsedBody(msgspec.Struct, frozen=True):
    """A parsed body. Whether its waiver of the fee applies depends on the conveyancer, and is not known yet.

    *errors* has an error for every failing field except the waiver's reason, whose error is *reason_error*.
    *values* has no value that is rejected or ignored, because bodies wait for Postgres: a body of 256 KiB may
    have 85,000 objects, which take 6 MB.
    """

    values: Mapping[str, Any]
    errors: Sequence[FieldError]
    asks_for_waiver: bool
    reason_error: FieldError | None

    def validated(self, *, waiver_applies: bool) -> dict[str, Any]:
        """Return the columns to be stored. Raises InvalidSubmission with every failing field, in order."""
        errors = [*self.errors]
        if waiver_applies and self.reason_error:
            errors.append(self.reason_error)
        if errors:
            errors.sort(key=lambda error: [*_fields, error.field].index(error.field))  # unknown fields last
            raise InvalidSubmission(errors)
        stored = {**self.values, **({} if waiver_applies else _NO_WAIVER)}
        if "" in stored.values():  # An empty text is rare, and this test is quicker than a copy.
            stored = {name: None if value == "" else value for name, value in stored.items()}
        if stored["meta_data"] is not None:
            stored["meta_data"] = msgspec.json.encode(stored["meta_data"]).decode()
        return stored

    def idempotency(self, key: str | None) -> Idempotency | None:
        """Return what identifies a repeat, or None if there is no key or the body has errors.

        The order of fields, whitespace, whether a null is sent or left out, and the conveyancer's fee setting
        make no difference.
        """
        if key is None or self.errors:
            return None
        # Fields at their defaults are left out, so that a field added by a later release changes no hash.
        submitted = {name: value for name, value in self.values.items() if value != _defaults[name]}
        normalised = msgspec.json.encode(submitted, order="deterministic")
        return Idempotency(key, hashlib.sha256(normalised).digest())


_REASON = "calculation_fee_exempt_reason"
_NO_WAIVER = {"calculation_fee_exempt": False, _REASON: None}


def parse(body: bytes) -> ParsedBody:
    """Read a body. Raises ApiError if it is not JSON, and InvalidSubmission if it is not an object."""
    errors: list[FieldError] = []
    try:
        try:
            values = msgspec.structs.asdict(_decoder.decode(body))
        except msgspec.ValidationError:
            values, errors = _read_field_by_field(msgspec.json.decode(body))
    except json_faults.UNREADABLE as error:
        reason = json_faults.why_unreadable(body, error)
        raise ApiError(
            HTTPStatus.BAD_REQUEST, "malformed_body", f"The body is not readable JSON: {reason}."
        ) from None
    for name, check in _checks.items():
        value = values.get(name)
        if value is not None and (failure := check(value)):
            errors.append(_field_error(name, *failure))
            del values[name]
    asks_for_waiver = values.get("calculation_fee_exempt") is True
    failure = _check_reason(values[_REASON]) if asks_for_waiver else None
    reason_error = _field_error(_REASON, *failure) if failure else None
    if failure or not asks_for_waiver:
        values[_REASON] = None
    return ParsedBody(values, errors, asks_for_waiver, reason_error)


def _check_reason(value: object) -> Failure | None:
    """Return why a waiver cannot have this reason, which may be any JSON value."""
    if value is None:
        return "required", "This field is required when calculation_fee_exempt is true."
    if not isinstance(value, str):
        return "invalid_type", "Expected a string."
    if len(value) > REASON_CHARACTERS:
        return _too_long(REASON_CHARACTERS, value)
    return text_rules.BLANK if text_rules.is_blank(value) else _check_text(value)


def _read_field_by_field(body: Any) -> tuple[dict[str, Any], list[FieldError]]:  # noqa: ANN401 - any JSON value
    """Return the fields of valid types, and an error for each field that is invalid, missing or unknown."""
    if not isinstance(body, dict):
        raise InvalidSubmission([FieldError("invalid_type", "The body must be a JSON object.", None, "")])
    values: dict[str, Any] = {}
    errors = []
    for name, field in _fields.items():
        if name not in body:
            if field.required:
                errors.append(_field_error(name, "required", "This field is required."))
            else:
                values[name] = field.default
            continue
        try:
            values[name] = msgspec.convert(_integral(body[name]), field.type)
        except msgspec.ValidationError as error:
            errors.append(_field_error(name, *_classify(str(error), body[name])))
    unknown = islice((name for name in body if name not in _fields), UNKNOWN_FIELDS_NAMED)
    errors += [
        _field_error(
            name[: text_rules.CHARACTERS], "unknown_field", "There is no such field: check its name."
        )
        for name in unknown
    ]
    return values, errors


def _integral(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return 300000.0 as 300000, because both are integers in JSON Schema, and so in the OpenAPI document.

    Not applied inside meta_data, where 3.0 stays 3.0.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _field_error(name: str, code: ErrorCode, message: str) -> FieldError:
    escaped = name.replace("~", "~0").replace("/", "~1")
    return FieldError(code, message, name, f"/{escaped}")


def _classify(problem: str, value: Any) -> Failure:  # noqa: ANN401 - any JSON value
    """Return the error code and message for a problem that msgspec reports about one value."""
    if problem.startswith("Expected `str` of length <= "):
        return _too_long(int(problem.rpartition(" ")[2]), value)
    if problem.startswith(("Expected `int` <=", "Expected `int` >=")):
        return "out_of_range", f"Expected an integer {problem.removeprefix('Expected `int` ')}."
    if problem.startswith("Invalid enum value"):
        return "invalid_choice", "Expected SDLT_CALCULATION."
    expected, _, got = json_faults.in_json_words(problem).removeprefix("Expected ").partition(", got ")
    return "invalid_type", f"Expected {expected}, got {got}."


def _too_long(longest: int, value: str) -> Failure:
    return "too_long", f"Expected at most {longest} characters, got {len(value)}."
