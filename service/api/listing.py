"""The query parameters of the list. Every failing parameter is reported at once."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Annotated, Any
from urllib.parse import parse_qsl
from uuid import UUID

import msgspec
from litestar.openapi.spec import Example
from litestar.params import QueryParameter

from service import text_rules
from service.api.bodies import LINE
from service.api.decoding import UNKNOWN_FIELDS_NAMED
from service.api.envelope import FieldError
from service.api.errors import Failure, InvalidSubmission
from service.api.resources import ApiRequest
from service.calculation_requests.model import Instant, RetrievedCalculationRequest
from service.calculation_requests.reading import Listing, Place, PlaceByAge, PlaceByChange
from service.identifiers import parse_uuid, uuid_of

DEFAULT_LIMIT = 20
LARGEST_LIMIT = 100
_NEWEST = PlaceByAge(UUID(int=2**128 - 1))  # no request is newer
_CURSOR = re.compile(r"(?:([0-9]{1,10})\.)?(req_\w{22})", re.ASCII)  # with seconds for a PlaceByChange
_PARAMETER = re.compile(r"[^&]+")
_LONGEST_INTEGER = 18  # digits, as in int64; int() rejects thousands of digits


class CalculationRequestPage(msgspec.Struct, frozen=True):
    """A page of the list; `next_cursor` leads to the next one, and is null on the last.

    The last page of changes has `next_updated_since`, with which to ask for later changes.
    """

    requests: list[RetrievedCalculationRequest]
    next_cursor: str | None
    next_updated_since: Instant | None


# These are for the document. `read_listing` checks the values, so each is declared as a text.
ExternalIdParameter = Annotated[
    str | None,
    QueryParameter(
        description="Only requests with this identifier in the caller's own system.",
        examples=[Example(value="case-17")],
        schema_extra={"max_length": text_rules.CHARACTERS, **LINE},
    ),
]
UpdatedSinceParameter = Annotated[
    str | None,
    QueryParameter(
        description="Only requests that have a calculation and were changed since this time, oldest "
        "change first. Begin with any time, and go on with the `next_updated_since` of the last page.",
        examples=[Example(value="2026-03-02T09:30:00Z")],
        schema_extra={"format": "date-time"},
    ),
]
LimitParameter = Annotated[
    str | None,
    QueryParameter(
        description="The maximum number of requests on a page. Large requests make pages shorter: a page "
        "with fewer requests is the last one only if its `next_cursor` is null.",
        schema_extra={"type": "integer", "minimum": 1, "maximum": LARGEST_LIMIT, "default": DEFAULT_LIMIT},
    ),
]
CursorParameter = Annotated[
    str | None,
    QueryParameter(
        description="The `next_cursor` of the previous page, with its other parameters. Leave it out for the "
        "first page.",
        examples=[Example(value="req_01a9ZkW3mT6qPxB8vNcR4d")],
        schema_extra={"pattern": r"^([0-9]{1,10}\.)?req_[0-6][0-9A-Za-z]{21}$"},
    ),
]


def parse_listing(
    request: ApiRequest[Any],
    external_id: ExternalIdParameter = None,  # noqa: ARG001
    updated_since: UpdatedSinceParameter = None,  # noqa: ARG001
    limit: LimitParameter = None,  # noqa: ARG001
    cursor: CursorParameter = None,  # noqa: ARG001
) -> Listing:
    """Return the listing that the query of an HTTP request describes, as a dependency of Litestar.

    Raises InvalidSubmission with all failing parameters. Litestar itself would pass unknown parameters, take
    the last of several with the same name, and stop at the first failing one.
    """
    return read_listing(request.scope["query_string"])


def read_listing(query_string: bytes) -> Listing:
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
    checks = _CHECKS_OF_CHANGES if "updated_since" in values else _CHECKS
    for name, check in checks.items():
        if times[name] > 1:
            failures[name] = "repeated", "This parameter was sent more than once: send it once."
        elif name in values:
            failures[name] = check(values[name])
    errors = [FieldError(*failure, name, None) for name, failure in sorted(failures.items()) if failure]
    after = _parse_place(values)
    if errors or after is None:
        raise InvalidSubmission(errors)
    return Listing(values.get("external_id"), int(values.get("limit", DEFAULT_LIMIT)), after)


def cursor_of(place: Place | None) -> str | None:
    """Return the cursor of the page after this place."""
    if isinstance(place, PlaceByChange):
        return f"{place.updated_at.timestamp():.0f}.{uuid_of(place.id)}"
    return place and uuid_of(place.id)


def _parse_place(values: Mapping[str, str]) -> Place | None:
    if "cursor" in values:
        return _parse_cursor(values["cursor"])
    return _parse_since(values["updated_since"]) if "updated_since" in values else _NEWEST


def _parse_since(text: str) -> PlaceByChange | None:
    try:
        return PlaceByChange(msgspec.convert(text, Instant).astimezone(UTC), UUID(int=0))  # No id is lower.
    except (msgspec.ValidationError, OverflowError):
        return None


def _parse_cursor(text: str) -> Place | None:
    match = _CURSOR.fullmatch(text)
    request_id = match and parse_uuid(match[2])
    if not (match and request_id):
        return None
    if not match[1]:
        return PlaceByAge(request_id)
    return PlaceByChange(datetime.fromtimestamp(int(match[1]), UTC), request_id)


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


def _check_since(value: str) -> Failure | None:
    if _parse_since(value) is None:
        return "invalid_type", "Expected a time with its zone, such as 2026-03-02T09:30:00Z."
    return None


def _check_cursor(kind: type[Place], value: str) -> Failure | None:
    if not isinstance(_parse_cursor(value), kind):
        return "invalid_cursor", "Expected the next_cursor of an earlier page of the same list."
    return None


_CHECKS: dict[str, Callable[[str], Failure | None]] = {
    "updated_since": _check_since,
    "external_id": _check_external_id,
    "limit": _check_limit,
    "cursor": partial(_check_cursor, PlaceByAge),
}
_CHECKS_OF_CHANGES = _CHECKS | {
    "external_id": lambda _: ("invalid_choice", "Send external_id or updated_since, not both."),
    "cursor": partial(_check_cursor, PlaceByChange),
}
_PARAMETERS_READ = len(_CHECKS) + UNKNOWN_FIELDS_NAMED
