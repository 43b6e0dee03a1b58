"""The subject of the measurements: a request of realistic size, and its event."""

from typing import Any

import msgspec

from service.outbox import asyncapi
from service.outbox.events import RequestCreated
from service.postgres.pool import Connection
from service.telemetry import tracing
from tests.harness import stored
from tests.harness.examples import A_REQUEST

_BODY: dict[str, Any] = A_REQUEST | {
    "customer_phone": "+44 20 7946 0000",
    "property_value": 300_000,
    "external_id": "case-1234567",
    "meta_data": {"source": "crm", "campaign_id": 7},
}
JSON_BODY = msgspec.json.encode(_BODY)
_COLUMNS = _BODY | {"meta_data": msgspec.json.encode(_BODY["meta_data"]).decode()}


async def store(connection: Connection) -> str:
    """Store a request and its event in the statement of the API, and return its uuid."""
    request = stored.new_request(**_COLUMNS)
    await stored.insert(connection, request, traceparent=tracing.onward(None))
    return request.uuid


def new_event() -> tuple[str, bytes]:
    """Return the uuid and the request.created of a new request."""
    request = stored.new_request(**_COLUMNS)
    event = asyncapi.example_of(request.event(RequestCreated, sequence=1), traceparent=tracing.onward(None))
    return request.uuid, msgspec.json.encode(event)
