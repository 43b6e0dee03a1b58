"""Rebuilds the events of a request from its rows: same ids, and same bodies except for the trace context."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby
from operator import itemgetter
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
    found = _histories(await connection.fetch(_FIND, request_id, conveyancer_id))
    if not found:
        await reading.find(connection, request_id, conveyancer_id=conveyancer_id)  # Raises the exact error.
        raise RequestNotFound
    return found[0]


async def read_internally(connection: Connection, request_id: UUID) -> EventHistory:
    """Return the history of a request of any conveyancer. Raises RequestErased and RequestNotFound."""
    found = await read(connection, [request_id])
    if not found:
        await reading.raise_not_found(connection, request_id)
    return found[0]


async def read(connection: Connection, request_ids: Sequence[UUID]) -> list[EventHistory]:
    """Return the histories of these requests, in the order of their ids."""
    return _histories(await connection.fetch(_READ, request_ids))


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


def _histories(rows: Iterable[asyncpg.Record]) -> list[EventHistory]:
    """Return the histories in these rows. A request has one row, or one for each of its later events."""
    return [_history(list(group)) for _, group in groupby(rows, key=itemgetter("id"))]


def _history(rows: Sequence[asyncpg.Record]) -> EventHistory:
    request = EventSource(*_request_in(rows[0]))
    later = [
        RecordedEvent(row["type"], row["event_sequence"], row["at"], row["facts"])
        for row in rows
        if row["type"] is not None
    ]
    return EventHistory(request, [_created(request.created_at), *later])


_request_in = itemgetter(*EventSource.__struct_fields__)
_SELECT = f"""
    SELECT {", ".join(f"request.{column}" for column in EventSource.__struct_fields__)},
           event.type, event.sequence AS event_sequence, event.at, event.facts
      FROM calculation_request AS request
      LEFT JOIN recorded_event AS event
        ON event.request_id = request.id
""".rstrip()  # noqa: S608 - constants only

_FIND = f"""{_SELECT}
     WHERE request.id = $1
       AND request.conveyancer_id = $2
       AND EXISTS (SELECT FROM active_conveyancer WHERE id = $2)
     ORDER BY event.sequence
"""
_READ = f"""{_SELECT}
     WHERE request.id = ANY($1)
     ORDER BY request.id, event.sequence
"""
