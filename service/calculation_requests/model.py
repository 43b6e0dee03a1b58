"""The request as a row, in its events and in answers of the API. api/bodies.py has the body of a create."""

from collections.abc import Mapping
from datetime import datetime
from operator import attrgetter, itemgetter
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, get_type_hints
from uuid import UUID

import msgspec

from service.calculation_requests import field_docs
from service.calculation_requests.request_secrets import SecretKeyRing
from service.identifiers import uuid_of
from service.outbox.events import DetailedRequestEvent, RequestEvent

RequestType = Literal["SDLT_CALCULATION"]
Instant = Annotated[datetime, msgspec.Meta(tz=True)]
Event = TypeVar("Event", bound=RequestEvent)
Value = TypeVar("Value")

# Marks the columns that the request's secret opens. Every other column is the firm's alone, or internal.
_FOR_CUSTOMER = "for the customer"
ForCustomer: TypeAlias = Annotated[Value, _FOR_CUSTOMER]


class RequestNotFound(Exception):
    """There is no such request."""


class AlreadyErased(RequestNotFound):
    """The request was erased."""


class AlreadyWithdrawn(Exception):
    """The request was withdrawn by its firm."""


class TooManyEmails(Exception):
    """At most one e-mail of a request a minute, and 20 in all: wait for Retry-After, or ask the operators."""


class IdempotencyKeyReused(Exception):
    """This Idempotency-Key was used with a different body: a new request needs a new key."""


class IdempotencyKeyInFlight(Exception):
    """Another request with this Idempotency-Key is being stored: try again after the time in Retry-After."""


class Idempotency(NamedTuple):
    """What identifies a repeat: the caller's key, and the SHA-256 of the normalised body."""

    key: str
    sha256: bytes


class EventSource(msgspec.Struct):
    """The columns of a request from which its events are made. They are neither personal nor secret."""

    id: UUID
    conveyancer_id: str
    created_at: ForCustomer[datetime]
    request_type: ForCustomer[RequestType]
    property_value: ForCustomer[int | None]
    external_id: str | None
    calculation_fee_exempt: ForCustomer[bool]
    calculation_id: ForCustomer[str | None]
    sequence: int

    @property
    def uuid(self) -> str:
        """The identifier that callers and customers see."""
        return uuid_of(self.id)

    @property
    def tenant(self) -> str:
        """The conveyancer, as events name it."""
        return self.conveyancer_id

    def event(self, event: type[Event], *, sequence: int, **facts: Any) -> Event:  # noqa: ANN401 - its fields
        """Return an event of this request. *facts* are the fields that only events of this type have."""
        facts |= {name: getattr(self, name) for name in event.__struct_fields__ if name in _IN_EVENTS}
        return event(sequence=sequence, **facts)


_IN_EVENTS = frozenset(DetailedRequestEvent.__struct_fields__) - {"sequence"}


class CalculationRequest(EventSource):
    """A row of calculation_request: what the caller sent, and what the service added. See COLUMNS."""

    updated_at: ForCustomer[datetime]
    customer_email: ForCustomer[str]
    customer_phone: ForCustomer[str | None]
    customer_first_name: ForCustomer[str]
    customer_last_name: ForCustomer[str]
    sender_email: ForCustomer[str]
    sender_organization_name: ForCustomer[str]
    sender_first_name: ForCustomer[str]
    sender_last_name: ForCustomer[str]
    case_ref: ForCustomer[str]
    notes: str | None
    meta_data: str | None  # JSON
    calculation_fee_exempt_reason: str | None
    secret_salt: bytes
    secret_key_id: str

    def secret_and_url(self, keys: SecretKeyRing, app_url: str) -> tuple[str, str]:
        """Return the secret and the link. Never log or queue them. Raises SecretKeyMissing."""
        secret = keys.secret(self.id, salt=self.secret_salt, key_id=self.secret_key_id)
        return secret, f"{app_url.rstrip('/')}/calculator/request/{self.uuid}?secret={secret}"

    def view(self) -> "RetrievedCalculationRequest":
        """Return what the API shows of this request without its secret."""
        return RetrievedCalculationRequest(*self._shown(None, None))

    def view_with_secret(self, secret: str, request_url: str) -> "CalculationRequestView":
        """Return what the API shows of this request to its firm."""
        return CalculationRequestView(*self._shown(secret, request_url))

    def _shown(self, *secret_and_url: str | None) -> list[Any]:
        # In the order of the fields: a page of 20 would take 40 µs more by their names.
        shown = [*_shown_values(self)]
        shown[_SECRET:_SECRET] = secret_and_url
        if self.meta_data is not None:
            shown[_META_DATA] = msgspec.json.decode(self.meta_data)
        return shown


# The columns are written once, as the fields of the struct. `SELECT *` is avoided, because prepared
# statements of open transactions would fail once a migration adds a column.
COLUMNS = ", ".join(CalculationRequest.__struct_fields__)
REQUEST_COLUMNS = ", ".join(f"request.{column}" for column in CalculationRequest.__struct_fields__)
FOR_CUSTOMER = tuple(
    name
    for name, hint in get_type_hints(CalculationRequest, include_extras=True).items()
    if _FOR_CUSTOMER in getattr(hint, "__metadata__", ())
)
_values_in = itemgetter(*CalculationRequest.__struct_fields__)


def request_in(row: Mapping[str, Any]) -> CalculationRequest:
    """Return the request in a row that has COLUMNS. It may have others."""
    return CalculationRequest(*_values_in(row))


class RetrievedCalculationRequest(msgspec.Struct, frozen=True):
    """A calculation request as it is read, alone or in a list.

    `secret` and `request_url` are null for an internal reader, and in a list while their key is missing.
    """

    uuid: Annotated[str, field_docs.UUID]
    created_at: Instant
    updated_at: Instant
    customer_email: Annotated[str, field_docs.CUSTOMER_EMAIL]
    customer_phone: Annotated[str | None, field_docs.CUSTOMER_PHONE]
    customer_first_name: Annotated[str, field_docs.CUSTOMER_FIRST_NAME]
    customer_last_name: Annotated[str, field_docs.CUSTOMER_LAST_NAME]
    sender_email: Annotated[str, field_docs.SENDER_EMAIL]
    sender_organization_name: Annotated[str, field_docs.SENDER_ORGANIZATION_NAME]
    sender_first_name: Annotated[str, field_docs.SENDER_FIRST_NAME]
    sender_last_name: Annotated[str, field_docs.SENDER_LAST_NAME]
    case_ref: Annotated[str, field_docs.CASE_REF]
    request_type: Annotated[RequestType, field_docs.REQUEST_TYPE]
    property_value: Annotated[int | None, field_docs.PROPERTY_VALUE]
    notes: Annotated[str | None, field_docs.NOTES]
    calculation_id: Annotated[str | None, field_docs.CALCULATION_ID]
    secret: Annotated[str | None, field_docs.SECRET]
    request_url: Annotated[Annotated[str, field_docs.URI] | None, field_docs.REQUEST_URL]
    external_id: Annotated[str | None, field_docs.EXTERNAL_ID]
    meta_data: Annotated[dict[str, Any] | None, field_docs.META_DATA]
    calculation_fee_exempt: Annotated[bool, field_docs.CALCULATION_FEE_EXEMPT]
    calculation_fee_exempt_reason: Annotated[str | None, field_docs.CALCULATION_FEE_EXEMPT_REASON]


class CalculationRequestView(RetrievedCalculationRequest, frozen=True):
    """A calculation request with its secret."""

    secret: Annotated[str, field_docs.SECRET]
    request_url: Annotated[str, field_docs.URI, field_docs.REQUEST_URL]


_FIELDS = RetrievedCalculationRequest.__struct_fields__
_SECRET, _META_DATA = _FIELDS.index("secret"), _FIELDS.index("meta_data")
_shown_values = attrgetter(*(name for name in _FIELDS if name not in {"secret", "request_url"}))
