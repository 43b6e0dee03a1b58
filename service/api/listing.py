"""The query of the list, and its pages."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID
from zlib import crc32

import msgspec
from msgspec import UNSET, UnsetType

from service.api.bodies import ExternalId
from service.api.decoding import CheckedBy, Sent, field_error
from service.api.envelope import FieldError
from service.api.errors import Failure
from service.calculation_requests.model import Instant, RetrievedCalculationRequest
from service.calculation_requests.reading import Listing, Place, PlaceByAge, PlaceByChange
from service.identifiers import parse_uuid, uuid_of

DEFAULT_LIMIT = 20
LARGEST_LIMIT = 100
_NEWEST = PlaceByAge(UUID(int=2**128 - 1))  # no request is newer
_OTHER_CURSOR: Failure = ("invalid_cursor", "Expected the next_cursor of a page with the same filter.")
_NO_FILTER: Failure = ("invalid_choice", "Send external_id or updated_since, not both.")
_CURSOR = re.compile(r"(?:([0-9]{1,10})\.)?(req_\w{22})", re.ASCII)  # with seconds for a PlaceByChange


class CalculationRequestPage(msgspec.Struct, frozen=True):
    """A page of the list; `next_cursor` leads to the next one, and is null on the last.

    The last page of changes has `next_updated_since`, with which to ask for later changes.
    """

    requests: list[RetrievedCalculationRequest]
    next_cursor: str | None
    next_updated_since: Instant | None


def _check_since(value: datetime) -> Failure | None:
    try:
        value.astimezone(UTC)
    except OverflowError:
        return "invalid_type", "Expected a time with its zone, such as 2026-03-02T09:30:00Z."
    return None


class ListQuery(Sent, frozen=True, kw_only=True):
    """The parameters of the list."""

    external_id: Annotated[
        ExternalId | UnsetType,
        msgspec.Meta(
            description="Only requests with this identifier in the caller's own system.",
            examples=["case-17"],
        ),
    ] = UNSET
    updated_since: Annotated[
        Instant | UnsetType,
        msgspec.Meta(
            description="Only requests that have a calculation and were changed since this time, oldest "
            "change first. Begin with any time, and go on with the `next_updated_since` of the last page.",
            examples=["2026-03-02T09:30:00Z"],
        ),
        CheckedBy(_check_since),
    ] = UNSET
    limit: Annotated[
        int,
        msgspec.Meta(
            ge=1,
            le=LARGEST_LIMIT,
            description="The maximum number of requests on a page. Large requests make pages shorter: a page "
            "with fewer requests is the last one only if its `next_cursor` is null.",
        ),
    ] = DEFAULT_LIMIT
    cursor: Annotated[
        str | UnsetType,
        msgspec.Meta(
            description="The `next_cursor` of the previous page, with its other parameters. Leave it out for "
            "the first page.",
            examples=["req_01a9ZkW3mT6qPxB8vNcR4d"],
            extra_json_schema={"pattern": r"^(f[0-9a-f]{8}-|[0-9]{1,10}\.)?req_[0-6][0-9A-Za-z]{21}$"},
        ),
    ] = UNSET

    @classmethod
    def joint_errors(cls, sent: Mapping[str, Any], *, others: bool) -> list[FieldError]:  # noqa: ARG003
        """Return the errors of parameters that are for the other list, of changes or of all requests."""
        errors = []
        expected = PlaceByAge if "updated_since" not in sent else PlaceByChange
        after = _parse_cursor(sent.get("cursor", ""), sent.get("external_id", UNSET))
        if "cursor" in sent and not isinstance(after, expected):
            errors.append(field_error(_OTHER_CURSOR, "cursor"))
        if "external_id" in sent and expected is PlaceByChange:
            errors.append(field_error(_NO_FILTER, "external_id"))
        return errors

    def listing(self) -> Listing:
        """Return which requests to list."""
        after: Place = _NEWEST
        if self.updated_since is not UNSET:
            after = PlaceByChange(self.updated_since.astimezone(UTC), UUID(int=0))  # No id is lower.
        if self.cursor is not UNSET:
            after = _parse_cursor(self.cursor, self.external_id) or after
        return Listing(None if self.external_id is UNSET else self.external_id, self.limit, after)


def cursor_of(place: Place | None, external_id: str | UnsetType) -> str | None:
    """Return the cursor of the page after this place, in the list with this filter."""
    if isinstance(place, PlaceByChange):
        return f"{place.updated_at.timestamp():.0f}.{uuid_of(place.id)}"
    return place and _mark(external_id) + uuid_of(place.id)


def _mark(external_id: str | UnsetType) -> str:
    """Return what a cursor of a filtered list begins with, so that it is refused with another filter."""
    return "" if external_id is UNSET else f"f{crc32(external_id.encode()):08x}-"


def _parse_cursor(text: str, external_id: str | UnsetType) -> Place | None:
    mark = _mark(external_id)
    match = _CURSOR.fullmatch(text, len(mark)) if text.startswith(mark) else None
    request_id = match and parse_uuid(match[2])
    if not (match and request_id):
        return None
    if not match[1]:
        return PlaceByAge(request_id)
    return PlaceByChange(datetime.fromtimestamp(int(match[1]), UTC), request_id)
