"""The subject of the measurements: a request of realistic size, the statement that stores it, its event."""

from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from service.calculation_requests import storing
from service.outbox import asyncapi
from service.outbox.events import RequestCreated
from service.postgres.pool import Connection
from service.telemetry import tracing
from tests.harness import stored
from tests.harness.examples import A_REQUEST

BODY: dict[str, Any] = A_REQUEST | {
    "customer_phone": "+44 20 7946 0000",
    "property_value": 300_000,
    "external_id": "case-1234567",
    "meta_data": {"source": "crm", "campaign_id": 7},
}
JSON_BODY = msgspec.json.encode(BODY)
COLUMNS = BODY | {"meta_data": msgspec.json.encode(BODY["meta_data"]).decode()}


class Statement(msgspec.Struct, frozen=True):
    """A statement and its arguments, as the product sends them."""

    text: str
    arguments: Sequence[Any]


def create_statement() -> Statement:
    """Return the product's own statement that stores a request and its event."""
    request = stored.new_request(**COLUMNS)
    arguments = storing.insert_arguments(request, None, tracing.onward(None))
    return Statement(storing.INSERT, arguments)


async def store(connection: Connection) -> str:
    """Store a request as the API does, and return its uuid."""
    request = stored.new_request(**COLUMNS)
    await stored.insert(connection, request, traceparent=tracing.onward(None))
    return request.uuid


def new_event() -> tuple[str, bytes]:
    """Return the uuid and the request.created of a new request."""
    request = stored.new_request(**COLUMNS)
    event = asyncapi.example_of(request.event(RequestCreated, sequence=1), traceparent=tracing.onward(None))
    return request.uuid, msgspec.json.encode(event)


async def create(client: httpx.AsyncClient) -> str:
    response = await client.post("/v1/request", content=JSON_BODY)
    response.raise_for_status()
    return str(response.json()["data"]["uuid"])
