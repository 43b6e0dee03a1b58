"""Reads the kept events of a request, for the API. They are shown as they are sent."""

from uuid import UUID

import msgspec

from service.calculation_requests import reading
from service.calculation_requests.model import RequestNotFound
from service.outbox.events import CloudEvent, RequestEvent, in_envelope
from service.postgres.pool import Connection


class CalculationRequestEvents(msgspec.Struct, frozen=True):
    """The events of a request so far, oldest first: as they are sent, but without `traceparent`."""

    events: list[CloudEvent[RequestEvent]]


async def find(connection: Connection, request_id: UUID, *, conveyancer_id: str) -> CalculationRequestEvents:
    """Return the events of a request of this conveyancer. Raises as `reading.find` does."""
    rows = await connection.fetch(_FIND, request_id, conveyancer_id)
    if not rows:
        await reading.find(connection, request_id, conveyancer_id=conveyancer_id)  # Raises the exact error.
        raise RequestNotFound
    return CalculationRequestEvents([in_envelope(row) for row in rows])


async def read_internally(connection: Connection, request_id: UUID) -> CalculationRequestEvents:
    """Return the events of a request of any conveyancer. Raises RequestErased and RequestNotFound."""
    rows = await connection.fetch(_READ_INTERNALLY, request_id)
    if not rows:
        await reading.raise_not_found(connection, request_id)
    return CalculationRequestEvents([in_envelope(row) for row in rows])


# The events of an erased request are kept, but only operators see them.
_SELECT = """
    SELECT request_id, type, sequence, time, data
      FROM event
     WHERE request_id = $1
       AND EXISTS (SELECT FROM calculation_request WHERE id = $1)
""".rstrip()
_FIND = f"""{_SELECT}
       AND conveyancer_id = $2
       AND EXISTS (SELECT FROM active_conveyancer WHERE id = $2)
     ORDER BY sequence
"""
_READ_INTERNALLY = f"""{_SELECT}
     ORDER BY sequence
"""
