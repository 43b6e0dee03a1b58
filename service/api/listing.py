"""The query of the list, and its pages."""

from collections.abc import Mapping
from typing import Annotated, Any
from uuid import UUID
from zlib import crc32

import msgspec
from msgspec import UNSET, UnsetType

from service.api.bodies import ExternalId
from service.api.decoding import Sent, field_error
from service.api.envelope import FieldError
from service.api.errors import Failure
from service.calculation_requests.model import RetrievedCalculationRequest
from service.identifiers import parse_uuid, uuid_of

DEFAULT_LIMIT = 20
LARGEST_LIMIT = 100
_NEWEST = UUID(int=2**128 - 1)  # no request is newer
_OTHER_CURSOR: Failure = ("invalid_cursor", "Expected the next_cursor of a page with the same filter.")


class CalculationRequestPage(msgspec.Struct, frozen=True):
    """A page of the list; `next_cursor` leads to the next one, and is null on the last."""

    requests: list[RetrievedCalculationRequest]
    next_cursor: str | None


class ListQuery(Sent, frozen=True, kw_only=True):
    """The parameters of the list."""

    external_id: Annotated[
        ExternalId | UnsetType,
        msgspec.Meta(
            description="Only requests with this identifier in the caller's own system.",
            examples=["case-17"],
        ),
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
            extra_json_schema={"pattern": r"^(f[0-9a-f]{8}-)?req_[0-6][0-9A-Za-z]{21}$"},
        ),
    ] = UNSET

    @classmethod
    def joint_errors(cls, sent: Mapping[str, Any], *, others: bool) -> list[FieldError]:  # noqa: ARG003
        """Return the error of a cursor that is malformed, or of the list with another filter."""
        if "cursor" not in sent or _parse_cursor(sent["cursor"], sent.get("external_id", UNSET)):
            return []
        return [field_error(_OTHER_CURSOR, "cursor")]

    def after(self) -> UUID:
        """Return the id after which the page begins."""
        return (self.cursor and _parse_cursor(self.cursor, self.external_id)) or _NEWEST


def cursor_of(last: UUID | None, external_id: str | UnsetType) -> str | None:
    """Return the cursor of the page after this id, in the list with this filter."""
    return None if last is None else _mark(external_id) + uuid_of(last)


def _mark(external_id: str | UnsetType) -> str:
    """Return what a cursor of a filtered list begins with, so that it is refused with another filter."""
    return "" if external_id is UNSET else f"f{crc32(external_id.encode()):08x}-"


def _parse_cursor(text: str, external_id: str | UnsetType) -> UUID | None:
    mark = _mark(external_id)
    return parse_uuid(text.removeprefix(mark)) if text.startswith(mark) else None
