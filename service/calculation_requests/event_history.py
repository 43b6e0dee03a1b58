"""Rebuilds the events of a request from its rows: same ids, and same bodies except for the trace context."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import asyncpg
import msgspec

from service.calculation_requests import reading
from service.calculation_requests.model import EventSource, RequestNotFound
from service.outbox.events import BY_TYPE, CloudEvent, RequestCreated, RequestEvent, in_envelope
from service.postgres.pool import Connection


class CalculationRequestEvents(msgspec.Struct, frozen=True):
    """The events of a request so far, oldest first: as they are sent, but without `traceparent`."""

    events: list[CloudEvent[RequestEvent]]


class RecordedEvent(msgspec.Struct, frozen=True):
    """An event that was written, and when. *facts* are the fields that only its type has, as JSON."""

    type: str
    sequence: int
    at: datetime
    facts: str = "{}"


class EventHistory(msgspec.Struct, frozen=True):
    """A request, and the events that were written about it, in order."""

    request: EventSource
    recorded_events: list[RecordedEvent]

    def rebuild(self, recorded: RecordedEvent) -> RequestEvent:
        """Return the event that was written."""
        facts = msgspec.json.decode(recorded.facts)
        return self.request.event(BY_TYPE[recorded.type], sequence=recorded.sequence, **facts)

    def view(self) -> CalculationRequestEvents:
        """Return what the API shows of this history."""
        shown = [
            in_envelope(self.rebuild(each), time=each.at, traceparent=None) for each in self.recorded_events
        ]
        return CalculationRequestEvents(shown)


async def find(connection: Connection, request_id: UUID, *, conveyancer_id: str) -> EventHistory:
    """Return the history of a request of this conveyancer. Raises as `reading.find` does."""
    row = await connection.fetchrow(_FIND, request_id, conveyancer_id)
    if row is None:
        await reading.find(connection, request_id, conveyancer_id=conveyancer_id)  # Raises the exact error.
        raise RequestNotFound
    return _history(row)


async def read_internally(connection: Connection, request_id: UUID) -> EventHistory:
    """Return the history of a request of any conveyancer. Raises RequestErased and RequestNotFound."""
    found = await read(connection, [request_id])
    if not found:
        await reading.raise_not_found(connection, request_id)
    return found[0]


async def read(connection: Connection, request_ids: Sequence[UUID]) -> list[EventHistory]:
    """Return the histories of these requests, in the order of their ids."""
    return [_history(row) for row in await connection.fetch(_READ, request_ids)]


async def read_recorded(
    connection: Connection, request_id: UUID, *, created_at: datetime
) -> list[RecordedEvent]:
    """Return the events that were written about a request, even if it was erased."""
    rows = await connection.fetch(
        "SELECT type, sequence, at, facts FROM recorded_event WHERE request_id = $1 ORDER BY sequence",
        request_id,
    )
    return [_created(created_at), *(RecordedEvent(**row) for row in rows)]


def _created(at: datetime) -> RecordedEvent:
    return RecordedEvent(RequestCreated.type, 1, at)


def _history(row: asyncpg.Record) -> EventHistory:
    *columns, later = row
    request = EventSource(*columns)
    return EventHistory(request, [_created(request.created_at), *(RecordedEvent(*each) for each in later)])


_SELECT = f"""
    SELECT {", ".join(EventSource.__struct_fields__)},
           ARRAY (SELECT ({", ".join(RecordedEvent.__struct_fields__)})
                    FROM recorded_event
                   WHERE request_id = calculation_request.id
                   ORDER BY sequence) AS later
      FROM calculation_request
""".rstrip()  # noqa: S608 - constants only

_FIND = f"""{_SELECT}
     WHERE id = $1
       AND conveyancer_id = $2
       AND EXISTS (SELECT FROM active_conveyancer WHERE id = $2)
"""
_READ = f"""{_SELECT}
     WHERE id = ANY($1)
     ORDER BY id
"""
