"""The bodies that the API takes: their types, lengths and rules. decoding.py reads them."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from service import text_rules
from service.api.decoding import Sent, field_error, too_long
from service.api.envelope import FieldError
from service.api.errors import Failure, InvalidSubmission
from service.calculation_requests import email_addresses, field_docs
from service.calculation_requests.field_docs import META_DATA_BYTES, META_DATA_DEPTH, REASON_CHARACTERS
from service.calculation_requests.model import Idempotency, RequestType

_INT64 = range(-(2**63), 2**63)

# The patterns in the OpenAPI document. They have no `\u…` escapes, because PCRE2 rejects such escapes, and
# zod's generators replace them by the characters. So the checks below reject more characters.
LINE = {"pattern": r"^[^\x00-\x1f\x7f]*$"}
TEXT = {"pattern": r"^[^\x00]*$"}
_FILLED_LINE = {"minLength": 1, **LINE}
_EMAIL = {"format": "email", "pattern": "^[^@]{1,64}@[^@]+$"}


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


# Where null is allowed, it means the same in a create as leaving the field out.
Name = Annotated[str, _at_most(text_rules.CHARACTERS, _FILLED_LINE), text_rules.check_filled_line]
EmailAddress = Annotated[str, _at_most(email_addresses.LONGEST, _EMAIL), _check_email]
PhoneNumber = Annotated[str, _at_most(32, LINE), text_rules.check_line]
ExternalId = Annotated[str, _at_most(text_rules.CHARACTERS, LINE), text_rules.check_line]
Notes = Annotated[str, _at_most(10_000, TEXT), _check_text]
Pounds = Annotated[int, msgspec.Meta(ge=0, le=10**12, extra_json_schema={"format": "int64"})]
MetaData = Annotated[dict[str, Any], _check_meta_data]
_NULL = msgspec.Raw(b"null")


class CreateBody(Sent, frozen=True, kw_only=True):
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
    # Any JSON value is accepted, because the reason is ignored unless the fee is waived. It is not
    # decoded: a value that is no reason may be large, and is kept while Postgres says if the waiver applies.
    calculation_fee_exempt_reason: Annotated[
        msgspec.Raw,
        msgspec.Meta(extra_json_schema={"type": ["string", "null"]}),
        field_docs.CALCULATION_FEE_EXEMPT_REASON,
    ] = msgspec.field(default_factory=lambda: _NULL)

    @classmethod
    def joint_errors(cls, sent: Mapping[str, Any], *, others: bool) -> list[FieldError]:
        """Return the error of the reason if there are others. Alone, it counts only if the waiver applies."""
        # Always looked for, because a reason that is not JSON makes the body malformed.
        errors = _errors_of_reason(sent)
        return errors if others else []

    def validated(self, *, waiver_applies: bool) -> dict[str, Any]:
        """Return the columns to store. Raises InvalidSubmission if a waiver that applies has no reason."""
        if waiver_applies and (errors := _errors_of_reason(msgspec.structs.asdict(self))):
            raise InvalidSubmission(errors)
        stored = self._normalised(waiver_applies=waiver_applies)
        if self.meta_data is not None:
            stored["meta_data"] = msgspec.json.encode(self.meta_data).decode()
        return stored

    def idempotency(self, key: str | None) -> Idempotency | None:
        """Return what identifies a repeat, or None if there is no key.

        Order, whitespace, a null or empty text for a field left out, and the firm's fee make no difference.
        """
        if key is None:
            return None
        values = self._normalised(waiver_applies=self.calculation_fee_exempt)
        # Fields at their defaults are left out, so that a field added by a later release changes no hash.
        submitted = {name: value for name, value in values.items() if value != _DEFAULTS[name]}
        normalised = msgspec.json.encode(submitted, order="deterministic")
        return Idempotency(key, hashlib.sha256(normalised).digest())

    def _normalised(self, *, waiver_applies: bool) -> dict[str, Any]:
        values = msgspec.structs.asdict(self)
        values["calculation_fee_exempt"] = waiver_applies
        values["calculation_fee_exempt_reason"] = _reason_in(values) if waiver_applies else None
        return {name: None if value == "" else value for name, value in values.items()}


class EmailBody(Sent, frozen=True, kw_only=True):
    """What to replace before the e-mail is sent. `{}` sends the same link to the same address again."""

    customer_email: Annotated[EmailAddress | None, field_docs.NEW_CUSTOMER_EMAIL] = None
    new_link: Annotated[
        bool,
        msgspec.Meta(
            description="Replace the link, which another address does, too. The old link then opens nothing.",
            examples=[True],
        ),
    ] = False


def _errors_of_reason(values: Mapping[str, Any]) -> list[FieldError]:
    """Return why a waiver cannot have its reason, which may be any JSON value."""
    if values.get("calculation_fee_exempt") is not True:
        return []
    reason = _reason_in(values)
    failure: Failure | None
    if reason is None:
        failure = ("required", "This field is required when calculation_fee_exempt is true.")
    elif not isinstance(reason, str):
        failure = ("invalid_type", "Expected a string.")
    elif len(reason) > REASON_CHARACTERS:
        failure = too_long(REASON_CHARACTERS, reason)
    else:
        failure = text_rules.BLANK if text_rules.is_blank(reason) else _check_text(reason)
    return [field_error(failure, "calculation_fee_exempt_reason")] if failure else []


def _reason_in(values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any JSON value
    return msgspec.json.decode(values.get("calculation_fee_exempt_reason", _NULL))


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(CreateBody)} | {
    "calculation_fee_exempt_reason": None
}
