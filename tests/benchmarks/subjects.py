"""The subject of the measurements: a request of realistic size, the statement that stores it, its event."""

from collections.abc import Sequence
from typing import Any, cast

import httpx
import msgspec

from service.calculation_requests.model import now
from service.identifiers import new_request_id, uuid_of
from service.outbox import events
from service.outbox.events import RequestCreated
from service.postgres.pool import Connection
from service.telemetry import tracing
from tests.benchmarks.stand import Stand
from tests.harness import stored
from tests.harness.examples import A_REQUEST, CONVEYANCER

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


class _Recorder:
    """A connection that records the statement instead of executing it."""

    statement: Statement

    async def fetchval(self, text: str, *arguments: Any) -> bool:
        self.statement = Statement(text, arguments)
        return True


async def create_statement() -> Statement:
    """Return the product's own statement that stores a request and its event."""
    recorder = _Recorder()
    await store(cast("Connection", recorder))
    return recorder.statement


async def store(connection: Connection, *, wakes: bool = False) -> str:
    """Store a request as the API does, and return its uuid. With *wakes* the commit wakes the relay."""
    request = stored.new_request(**COLUMNS)
    await stored.insert(connection, request, traceparent=tracing.onward(None), wakes=wakes)
    return request.uuid


def event(uuid: str | None = None) -> bytes:
    """Return the request.created of a request."""
    uuid = uuid or uuid_of(new_request_id())
    data = RequestCreated(
        uuid=uuid,
        tenant=CONVEYANCER,
        request_type="SDLT_CALCULATION",
        property_value=300_000,
        calculation_fee_exempt=False,
        external_id="case-1234567",
        sequence=1,
    )
    return events.encode(data, time=now(), traceparent=tracing.onward(None))


_STORED = 200


async def create_over_http(stand: Stand, base_url: str) -> list[str]:
    """Store some requests through an API; return their paths."""
    headers = {"Authorization": f"Bearer {stand.token}", "Content-Type": "application/json"}
    paths = []
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=10.0) as client:
        for _ in range(_STORED):
            response = await client.post("/v1/request", content=JSON_BODY)
            response.raise_for_status()
            paths.append(f"/v1/request/{response.json()['data']['uuid']}")
    return paths
