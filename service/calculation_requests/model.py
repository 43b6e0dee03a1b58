"""The calculation request: as it is asked for, as a row, and as the interface returns it."""

from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec

from service.calculation_requests import request_secrets
from service.calculation_requests.request_secrets import SecretKeyRing
from service.identifiers import uuid_of

RequestType = Literal["SDLT_CALCULATION"]
Uuid = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": "^req_[0-9A-Za-z]{22}$"})]
Url = Annotated[str, msgspec.Meta(extra_json_schema={"format": "uri"})]
Instant = Annotated[datetime, msgspec.Meta(tz=True)]


class RequestNotFound(Exception):
    """There is no such request."""


class ListedCalculationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A calculation request in a list. The secret is null while the service lacks the key that made it."""

    uuid: Uuid
    created_at: Instant
    updated_at: Instant
    customer_email: str
    customer_phone: str | None
    customer_first_name: str
    customer_last_name: str
    sender_email: str
    sender_organization_name: str
    sender_first_name: str
    sender_last_name: str
    case_ref: str
    request_type: RequestType
    property_value: int | None
    notes: str | None
    calculation_id: str | None
    secret: str | None
    request_url: Url | None
    external_id: str | None
    meta_data: dict[str, Any] | None
    calculation_fee_exempt: bool
    calculation_fee_exempt_reason: str | None


class CalculationRequestRecord(ListedCalculationRequest, frozen=True, kw_only=True):
    """A calculation request as create and retrieve return it (interface, *Request, as returned*)."""

    secret: str
    request_url: Url


class CalculationRequest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A row of calculation_request."""

    id: UUID
    conveyancer_id: str
    created_at: datetime
    updated_at: datetime
    customer_email: str
    customer_phone: str | None
    customer_first_name: str
    customer_last_name: str
    sender_email: str
    sender_organization_name: str
    sender_first_name: str
    sender_last_name: str
    case_ref: str
    request_type: RequestType
    property_value: int | None
    notes: str | None
    external_id: str | None
    meta_data: str | None
    calculation_fee_exempt: bool
    calculation_fee_exempt_reason: str | None
    calculation_id: str | None
    secret_salt: bytes
    secret_key_id: str
    sequence: int

    @cached_property
    def uuid(self) -> str:
        """The identifier as the outside sees it."""
        return uuid_of(self.id)

    def request_url(self, keys: SecretKeyRing, app_url: str) -> str:
        """Return the customer's link, secret included: never to be logged or queued.

        Raises SecretKeyMissing.
        """
        return request_secrets.request_url(app_url, self.uuid, self.secret(keys))

    def secret(self, keys: SecretKeyRing) -> str:
        """Return the secret that opens this request. Raises SecretKeyMissing."""
        return keys.secret(self.id, salt=self.secret_salt, key_id=self.secret_key_id)

    def record(self, keys: SecretKeyRing, app_url: str) -> CalculationRequestRecord:
        """Return what the interface shows of this request. Raises SecretKeyMissing."""
        secret = self.secret(keys)
        url = request_secrets.request_url(app_url, self.uuid, secret)
        return CalculationRequestRecord(secret=secret, request_url=url, **self._shown())

    def record_without_secret(self) -> ListedCalculationRequest:
        """Return what can be shown of this request while the key of its secret is missing."""
        return ListedCalculationRequest(secret=None, request_url=None, **self._shown())

    def _shown(self) -> dict[str, Any]:
        return {
            "uuid": self.uuid,
            "created_at": self.created_at,
            "updated_at": self.updated_at,
            "customer_email": self.customer_email,
            "customer_phone": self.customer_phone,
            "customer_first_name": self.customer_first_name,
            "customer_last_name": self.customer_last_name,
            "sender_email": self.sender_email,
            "sender_organization_name": self.sender_organization_name,
            "sender_first_name": self.sender_first_name,
            "sender_last_name": self.sender_last_name,
            "case_ref": self.case_ref,
            "request_type": self.request_type,
            "property_value": self.property_value,
            "notes": self.notes,
            "calculation_id": self.calculation_id,
            "external_id": self.external_id,
            "meta_data": None if self.meta_data is None else msgspec.json.decode(self.meta_data),
            "calculation_fee_exempt": self.calculation_fee_exempt,
            "calculation_fee_exempt_reason": self.calculation_fee_exempt_reason,
        }

    def facts(self, *, sequence: int) -> dict[str, Any]:
        """Return the fields that every event about this request carries."""
        return {
            "uuid": self.uuid,
            "tenant": self.conveyancer_id,
            "request_type": self.request_type,
            "property_value": self.property_value,
            "calculation_fee_exempt": self.calculation_fee_exempt,
            "external_id": self.external_id,
            "sequence": sequence,
        }


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request as submitted, after the rules of the fee waiver."""

    customer_email: str
    customer_phone: str | None
    customer_first_name: str
    customer_last_name: str
    sender_email: str
    sender_organization_name: str
    sender_first_name: str
    sender_last_name: str
    case_ref: str
    request_type: RequestType
    property_value: int | None
    notes: str | None
    external_id: str | None
    meta_data: dict[str, Any] | None
    calculation_fee_exempt: bool
    calculation_fee_exempt_reason: str | None
