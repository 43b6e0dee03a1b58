"""Reads the kept events of a request, for the API. They are shown as they are sent."""

import msgspec

from service.calculation_requests.model import CalculationRequest
from service.outbox.events import CloudEvent, RequestEvent, in_envelope
from service.postgres.pool import Connection


class CalculationRequestEvents(msgspec.Struct, frozen=True):
    """The events of a request so far, oldest first: as they are sent, but without `traceparent`."""

    events: list[CloudEvent[RequestEvent]]


async def read(connection: Connection, request: CalculationRequest) -> CalculationRequestEvents:
    """Return the events of a request, which was read for the same caller."""
    rows = await connection.fetch(
        "SELECT request_id, type, sequence, time, data FROM event WHERE request_id = $1 ORDER BY sequence",
        request.id,
    )
    return CalculationRequestEvents([in_envelope(row) for row in rows])
