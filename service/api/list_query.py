"""The list of requests: what a caller may ask of it, every reason to refuse that, and a page of it."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import islice
from urllib.parse import parse_qsl
from uuid import UUID

import msgspec

from service import lines
from service.api.envelope import FieldError
from service.api.errors import Failure, InvalidSubmission
from service.api.request_body import UNKNOWN_FIELDS_NAMED
from service.calculation_requests import conveyancers, reading
from service.calculation_requests.model import CalculationRequest, ListedCalculationRequest
from service.identifiers import parse_uuid, uuid_of
from service.postgres.pool import Connection

DEFAULT_LIMIT = 20
LARGEST_LIMIT = 100
_NEWEST = uuid_of(UUID(int=2**128 - 1))  # no request is newer
_PARAMETER = re.compile(r"[^&]+")
_INTEGER = re.compile(r"-?[0-9]+", re.ASCII)
_LONGEST_INTEGER = 18  # digits: those of int64, and far from what int() refuses to read


class CalculationRequestPage(msgspec.Struct, frozen=True):
    """A page of the list; `next_cursor` leads to the next one, and is null on the last."""

    requests: list[ListedCalculationRequest]
    next_cursor: str | None


class Listing(msgspec.Struct, frozen=True):
    """Which requests to list: at most *limit*, older than *before*, and those with *external_id* if given."""

    external_id: str | None
    limit: int
    before: UUID


def parse_listing(query_string: bytes) -> Listing:
    """Return what a query string asks for. Raises InvalidSubmission with every failing parameter.

    Of thousands it reads no more than must hold a wrong one: to read all would take longer than to list.
    """
    parts = islice(_PARAMETER.finditer(query_string.decode("latin-1")), _PARAMETERS_READ)
    query = parse_qsl("&".join(part[0] for part in parts), keep_blank_values=True)
    times = Counter(name for name, _ in query)
    values = dict(query)
    unknown = islice((name for name in values if name not in _CHECKS), UNKNOWN_FIELDS_NAMED)
    told = [*(name for name in _CHECKS if name in values), *unknown]
    failures = {name: _failure(name, values[name], times[name]) for name in told}
    errors = [FieldError(*failure, name, None) for name, failure in sorted(failures.items()) if failure]
    before = parse_uuid(values.get("cursor", _NEWEST))
    if errors or before is None:
        raise InvalidSubmission(errors)
    return Listing(values.get("external_id"), int(values.get("limit", DEFAULT_LIMIT)), before)


async def read_page(
    connection: Connection, listing: Listing, *, conveyancer_id: str
) -> tuple[list[CalculationRequest], str | None]:
    """Return a page of this conveyancer's requests, newest first, and the cursor of the next page, if any.

    Raises UnknownConveyancer.
    """
    found = await reading.list_newest(
        connection,
        conveyancer_id=conveyancer_id,
        external_id=listing.external_id,
        before=listing.before,
        limit=listing.limit + 1,
    )
    if not found:
        await conveyancers.check_registered(connection, conveyancer_id)
    page = found[: listing.limit]
    return page, page[-1].uuid if len(found) > listing.limit else None


def _failure(name: str, value: str, times: int) -> Failure | None:
    if name not in _CHECKS:
        return "unknown_field", "There is no such parameter."
    if times > 1:
        return "repeated", "This parameter may be given once."
    return _CHECKS[name](value)


def _check_external_id(value: str) -> Failure | None:
    if len(value) > lines.CHARACTERS:
        return "too_long", f"Expected at most {lines.CHARACTERS} characters."
    return lines.check_line(value)


def _check_limit(value: str) -> Failure | None:
    if not _INTEGER.fullmatch(value):
        return "invalid_type", "Expected an integer."
    if len(value) > _LONGEST_INTEGER or not 1 <= int(value) <= LARGEST_LIMIT:
        return "out_of_range", f"Expected 1 to {LARGEST_LIMIT}."
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
