"""The query parameters of the list. Every failing parameter is reported at once."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import islice
from urllib.parse import parse_qsl
from uuid import UUID

import msgspec

from service import text_rules
from service.api.envelope import FieldError
from service.api.errors import Failure, InvalidSubmission
from service.api.request_body import UNKNOWN_FIELDS_NAMED
from service.calculation_requests.model import RetrievedCalculationRequest
from service.calculation_requests.reading import Listing
from service.identifiers import parse_uuid, uuid_of

DEFAULT_LIMIT = 20
LARGEST_LIMIT = 100
_NEWEST = uuid_of(UUID(int=2**128 - 1))  # no request is newer
_PARAMETER = re.compile(r"[^&]+")
_LONGEST_INTEGER = 18  # digits, as in int64; int() rejects thousands of digits


class CalculationRequestPage(msgspec.Struct, frozen=True):
    """A page of the list; `next_cursor` leads to the next one, and is null on the last."""

    requests: list[RetrievedCalculationRequest]
    next_cursor: str | None


def parse_listing(query_string: bytes) -> Listing:
    """Return the listing that a query string describes. Raises InvalidSubmission with all failing parameters.

    Only the first _PARAMETERS_READ parameters are parsed, because a query may have thousands.
    """
    parts = islice(_PARAMETER.finditer(query_string.decode("latin-1")), _PARAMETERS_READ)
    query = parse_qsl("&".join(part[0] for part in parts), keep_blank_values=True)
    times = Counter(name for name, _ in query)
    values = dict(query)
    unknown = islice((name for name in values if name not in _CHECKS), UNKNOWN_FIELDS_NAMED)
    failures: dict[str, Failure | None] = dict.fromkeys(
        unknown, ("unknown_field", "There is no such parameter: check its name.")
    )
    for name, check in _CHECKS.items():
        if times[name] > 1:
            failures[name] = "repeated", "This parameter was sent more than once: send it once."
        elif name in values:
            failures[name] = check(values[name])
    errors = [FieldError(*failure, name, None) for name, failure in sorted(failures.items()) if failure]
    before = parse_uuid(values.get("cursor", _NEWEST))
    if errors or before is None:
        raise InvalidSubmission(errors)
    return Listing(values.get("external_id"), int(values.get("limit", DEFAULT_LIMIT)), before)


def _check_external_id(value: str) -> Failure | None:
    if len(value) > text_rules.CHARACTERS:
        return "too_long", f"Expected at most {text_rules.CHARACTERS} characters, got {len(value)}."
    return text_rules.check_line(value)


def _check_limit(value: str) -> Failure | None:
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        return "invalid_type", "Expected an integer."
    if len(value) > _LONGEST_INTEGER or not 1 <= int(value) <= LARGEST_LIMIT:
        return "out_of_range", f"Expected an integer from 1 to {LARGEST_LIMIT}."
    return None


def _check_cursor(value: str) -> Failure | None:
    if parse_uuid(value) is None:
        return "invalid_cursor", "Expected the next_cursor of an earlier page."
    return None


_CHECKS: dict[str, Callable[[str], Failure | None]] = {
    "external_id": _check_external_id,
    "limit": _check_limit,
    "cursor": _check_cursor,
}
_PARAMETERS_READ = len(_CHECKS) + UNKNOWN_FIELDS_NAMED
