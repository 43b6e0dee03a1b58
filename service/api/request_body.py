"""What a caller may submit, and every reason to refuse it: all failing fields are named at once."""

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import islice
from typing import Annotated, Any

import email_validator
import msgspec

from service import lines
from service.api.envelope import ErrorCode, FieldError
from service.api.errors import Failure, InvalidSubmission, MalformedBody
from service.calculation_requests.model import RequestType, Submission

UNKNOWN_FIELDS_NAMED = 50  # of thousands, the answer would take longer than a request that is stored
META_DATA_BYTES = 16 * 1024
META_DATA_DEPTH = 16
REASON_CHARACTERS = 500
_LARGE_BODY = 32 * 1024  # bytes
_INT64 = range(-(2**63), 2**63)

# The patterns show readers of the OpenAPI document what the checks below refuse, with codes of their own.
LINE = {"pattern": f"^[^{lines.FORBIDDEN}]*$"}
_SHOWN = f"[^{lines.FORBIDDEN}{lines.SPACES}{lines.INVISIBLE}]"
_FILLED_LINE = {"minLength": 1, "pattern": f"^[^{lines.FORBIDDEN}]*{_SHOWN}[^{lines.FORBIDDEN}]*$"}
FILLED_TEXT = {"minLength": 1, "pattern": rf"^[^\u0000]*{_SHOWN}[^\u0000]*$"}
_TEXT = {"pattern": r"^[^\u0000]*$"}
_EMAIL = {"format": "email", "pattern": "^[^@]{1,64}@[^@]+$"}

Name = Annotated[str, msgspec.Meta(max_length=lines.CHARACTERS, extra_json_schema=_FILLED_LINE)]
EmailAddress = Annotated[str, msgspec.Meta(max_length=254, extra_json_schema=_EMAIL)]
PhoneNumber = Annotated[str, msgspec.Meta(max_length=32, extra_json_schema=LINE)]
ExternalId = Annotated[str, msgspec.Meta(max_length=lines.CHARACTERS, extra_json_schema=LINE)]
Notes = Annotated[str, msgspec.Meta(max_length=10_000, extra_json_schema=_TEXT)]
Pounds = Annotated[int, msgspec.Meta(ge=0, le=10**12, extra_json_schema={"format": "int64"})]


class CalculationRequestForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a create request: types and lengths (interface, *Request, as sent on creation*)."""

    customer_email: EmailAddress
    customer_phone: PhoneNumber | None = None
    customer_first_name: Name
    customer_last_name: Name
    sender_email: EmailAddress
    sender_organization_name: Name
    sender_first_name: Name
    sender_last_name: Name
    case_ref: Name
    request_type: RequestType = "SDLT_CALCULATION"
    property_value: Pounds | None = None
    notes: Notes | None = None
    external_id: ExternalId | None = None
    meta_data: dict[str, Any] | None = None
    calculation_fee_exempt: bool = False
    # Looked at only when the waiver applies: until then anything goes, as the interface says *ignored*.
    calculation_fee_exempt_reason: Any = None


_OPTIONAL_TEXTS = ("customer_phone", "notes", "external_id")
_decoder = msgspec.json.Decoder(CalculationRequestForm)
_fields = {field.name: field for field in msgspec.structs.fields(CalculationRequestForm)}


class Draft:
    """A submitted body whose fee waiver has yet to be judged, for which the conveyancer must be known."""

    def __init__(self, body: bytes) -> None:
        """Read *body*. Raises MalformedBody; `validated` says what is wrong with its fields."""
        self.values: Mapping[str, Any]
        self.errors: list[FieldError] = []
        form = _read_at_once(body)
        if form is None:
            self.values, self.errors = _read_field_by_field(_decode_plain(body))
        else:
            self.values = msgspec.structs.asdict(form)
        self.errors += _failing_fields(self.values)

    @property
    def asks_for_waiver(self) -> bool:
        """Whether the conveyancer's fee setting matters."""
        return self.values.get("calculation_fee_exempt") is True

    def validated(self, *, waiver_applies: bool) -> Submission:
        """Return the submission. Raises InvalidSubmission with every failing field."""
        reason = self.values.get("calculation_fee_exempt_reason") if waiver_applies else None
        errors = self.errors + (_reason_errors(reason) if waiver_applies else [])
        if errors:
            raise InvalidSubmission(errors)
        waiver = {"calculation_fee_exempt": waiver_applies, "calculation_fee_exempt_reason": reason}
        optional = {name: self.values[name] or None for name in _OPTIONAL_TEXTS}  # "" is as good as nothing
        return Submission(**{**self.values, **optional, **waiver})

    def sha256(self) -> bytes:
        """Return the fingerprint of what was submitted, however it was written and whatever the fee."""
        reason = self.values.get("calculation_fee_exempt_reason") if self.asks_for_waiver else None
        values = {**self.values, "calculation_fee_exempt_reason": reason}
        # Without defaults, so that a field which a later release adds changes no fingerprint.
        submitted = {name: value for name, value in values.items() if value != _fields[name].default}
        return hashlib.sha256(msgspec.json.encode(submitted, order="deterministic")).digest()


def _read_at_once(body: bytes) -> CalculationRequestForm | None:
    """Return all fields, None when they must be read one by one: some may be wrong, or the body is large.

    A large body is read once only. Twice, a refusal would cost more than storing it.
    """
    if len(body) > _LARGE_BODY:
        return None
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise MalformedBody from None


def _failing_fields(values: Mapping[str, Any]) -> list[FieldError]:
    """Return what is wrong with the fields that have the right type."""
    failing = []
    for name, check in _CHECKS.items():
        value = values.get(name)
        if value is not None and (failure := check(value)):
            failing.append(_field_error(name, *failure))
    return failing


def _decode_plain(body: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise MalformedBody from None
    if not isinstance(decoded, dict):
        error = FieldError("invalid_type", "The body must be a JSON object.", None, "")
        raise InvalidSubmission([error])
    return decoded


def _read_field_by_field(body: dict[str, Any]) -> tuple[dict[str, Any], list[FieldError]]:
    """Return the fields of the right type, and an error for each that is not, is missing or unknown."""
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
            errors.append(_field_error(name, *_classify(str(error))))
    unknown = islice((name for name in body if name not in _fields), UNKNOWN_FIELDS_NAMED)
    errors += [_field_error(name, "unknown_field", "There is no such field.") for name in unknown]
    return values, errors


def _integral(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return 300000.0 as 300000: JSON Schema, and with it our document, calls both an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _field_error(name: str, code: ErrorCode, message: str) -> FieldError:
    escaped = name.replace("~", "~0").replace("/", "~1")
    return FieldError(code, message, name, f"/{escaped}")


def _classify(problem: str) -> Failure:
    """Return our code and sentence for what msgspec says of a single value."""
    plain = problem.partition(" - at ")[0].replace("`", "")
    if plain.startswith("Expected str of length"):
        return "too_long", f"{plain} characters."
    if plain.startswith(("Expected int <=", "Expected int >=")):
        return "out_of_range", f"{plain}."
    if plain.startswith("Invalid enum value"):
        return "invalid_choice", "Expected SDLT_CALCULATION."
    return "invalid_type", f"{plain}."


def _check_text(value: str) -> Failure | None:
    return ("invalid_characters", "NUL characters are not allowed.") if "\0" in value else None


# An encoded word (RFC 2047) may stand in an address, but programs decode it there: the mail then names
# somebody else, or cannot be made.
_ENCODED_WORD = re.compile(r"=\?.*\?=")

# Of these the domain decides: the part before the @ is valid, and nothing gets longer when it is decoded.
_PLAIN_ADDRESS = re.compile(
    r"[a-z0-9_+-]{1,32}(?:\.[a-z0-9_+-]{1,31})?@((?!.*xn--)[a-z0-9.-]+)", re.ASCII | re.IGNORECASE
)


def _check_email(value: str) -> Failure | None:
    if failure := lines.check_filled_line(value):
        return failure
    plain = _PLAIN_ADDRESS.fullmatch(value)
    is_valid = _is_valid_domain(plain[1]) if plain else _is_valid_address(value)
    return None if is_valid else ("invalid_email", "Expected the e-mail address of exactly one recipient.")


@lru_cache(maxsize=4096)
def _is_valid_domain(domain: str) -> bool:
    """Remembered, because most people's addresses end in one of few, and to look at one takes long."""
    return _is_valid_address(f"a@{domain}")


def _is_valid_address(value: str) -> bool:
    if _ENCODED_WORD.search(value):
        return False
    try:
        email_validator.validate_email(
            value,
            check_deliverability=False,
            allow_smtputf8=False,
            test_environment=True,
            strict=True,  # the part before the @ too is no longer than mail servers must take
        )
    except email_validator.EmailNotValidError:
        return False
    return True


_TOO_DEEP: Failure = ("too_deep", f"Expected at most {META_DATA_DEPTH} levels of nesting.")


def _check_meta_data(value: dict[str, Any]) -> Failure | None:
    try:
        size = len(msgspec.json.encode(value))  # first: much takes long to look at
    except RecursionError:
        return _TOO_DEEP
    if size > META_DATA_BYTES:
        return "too_long", f"Expected at most {META_DATA_BYTES} bytes of JSON."
    return _check_json(value, depth=1)


def _check_json(value: Any, *, depth: int) -> Failure | None:  # noqa: ANN401 - any JSON value
    """Check strings, numbers and depth of a JSON value; the recursion ends at META_DATA_DEPTH."""
    match value:
        case str():
            return _check_text(value)
        case dict() | list() if depth > META_DATA_DEPTH:
            return _TOO_DEEP
        case dict():
            parts = [*value.keys(), *value.values()]
            return next(filter(None, (_check_json(part, depth=depth + 1) for part in parts)), None)
        case list():
            return next(filter(None, (_check_json(part, depth=depth + 1) for part in value)), None)
        case int() | float() if not _INT64[0] <= value <= _INT64[-1]:
            return "out_of_range", "Numbers must be within the range of 64-bit integers."
    return None


def _reason_errors(reason: Any) -> list[FieldError]:  # noqa: ANN401 - any JSON value
    """Check the reason of a waiver that applies."""
    failure: Failure | None
    if reason is None:
        failure = "required", "This field is required when calculation_fee_exempt is true."
    elif not isinstance(reason, str):
        failure = "invalid_type", "Expected str."
    elif len(reason) > REASON_CHARACTERS:
        failure = "too_long", f"Expected str of length <= {REASON_CHARACTERS} characters."
    elif lines.is_blank(reason):
        failure = lines.BLANK
    else:
        failure = _check_text(reason)
    return [_field_error("calculation_fee_exempt_reason", *failure)] if failure else []


_CHECKS: dict[str, Callable[[Any], Failure | None]] = {
    "customer_email": _check_email,
    "customer_phone": lines.check_line,
    "customer_first_name": lines.check_filled_line,
    "customer_last_name": lines.check_filled_line,
    "sender_email": _check_email,
    "sender_organization_name": lines.check_filled_line,
    "sender_first_name": lines.check_filled_line,
    "sender_last_name": lines.check_filled_line,
    "case_ref": lines.check_filled_line,
    "notes": _check_text,
    "external_id": lines.check_line,
    "meta_data": _check_meta_data,
}
