"""Rebuilds the events of a request from its rows: same ids, and same bodies except for the trace context."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import chain, groupby
from typing import NamedTuple
from uuid import UUID

import asyncpg
import msgspec

from service.calculation_requests import reading
from service.calculation_requests.model import EventSource, RequestNotFound
from service.outbox.events import CloudEvent, RequestCalculated, RequestCreated, RequestEvent, in_envelope
from service.postgres.pool import Connection


class CalculationRequestEvents(msgspec.Struct, frozen=True):
    """The events of a request so far, oldest first: as they are sent, but without `traceparent`."""

    events: list[CloudEvent[RequestEvent]]


class RecordedEvent(NamedTuple):
    """An event that was written, and its time."""

    event: RequestEvent
    at: datetime


class EventHistory(msgspec.Struct, frozen=True):
    """A request, and the events that were written about it, in order."""

    request: EventSource
    calculated_at: datetime | None
    recorded_events: list[RecordedEvent]

    def view(self) -> CalculationRequestEvents:
        """Return what the API shows of this history."""
        shown = [in_envelope(event, time=at, traceparent=None) for event, at in self.recorded_events]
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


async def read_erased(connection: Connection, request_id: UUID) -> list[EventHistory]:
    """Return what is left of a request's history if it was erased, such as the types and times of events."""
    return _histories(await connection.fetch(_READ_ERASED, request_id))


async def read_page(connection: Connection, *, after: UUID, limit: int) -> list[EventHistory]:
    """Return the next histories in the order of request ids, which is the order of creation."""
    return _histories(await connection.fetch(_READ_PAGE, after, limit))


def _histories(rows: Iterable[asyncpg.Record]) -> list[EventHistory]:
    """Return the histories in these rows. A request has one row, or one for each of its ended e-mails."""
    return [_history(list(group)) for _, group in groupby(rows, key=lambda row: row["id"])]


def _history(rows: Sequence[asyncpg.Record]) -> EventHistory:
    first = rows[0]
    request = EventSource(*first[: len(EventSource.__struct_fields__)])
    found = [RecordedEvent(RequestCreated(**request.event_payload(sequence=1)), request.created_at)]
    for event, (sequence_column, time_column, *own) in RECORDED.items():
        if (sequence := first[sequence_column]) is not None:
            facts = request.event_payload(sequence=sequence) | {column: first[column] for column in own}
            found.append(RecordedEvent(event(**facts), first[time_column]))
    for row in rows:
        if (sequence := row["event_sequence"]) is not None:
            code = row["smtp_code"] or 0
            ended = request.email_event(sequence=sequence, reason=row["reason"], smtp_code=code)
            found.append(RecordedEvent(ended, row["settled_at"].replace(microsecond=0)))
    found.sort(key=lambda recorded: recorded.event.sequence)
    return EventHistory(request, first["calculated_at"], found)


# For each type of event that a request's row records, its columns: sequence, time and own fields, if any. The
# last column is null until the event happens. The events of e-mails have their columns in the table email.
RECORDED = {RequestCalculated: ("calculation_sequence", "calculated_at", "calculation_id")}
RECORDED_COLUMNS = tuple(chain.from_iterable(RECORDED.values()))
_COLUMNS = f"""
    {", ".join(f"request.{column}" for column in (*EventSource.__struct_fields__, *RECORDED_COLUMNS))},
           email.event_sequence, email.settled_at, email.smtp_code, email.reason
""".strip()
_WITH_EMAILS = """
    AS request
      LEFT JOIN email
        ON email.request_id = request.id
       AND email.event_sequence IS NOT NULL
       AND email.settled_at IS NOT NULL
""".strip()

_SELECT = f"""
    SELECT {_COLUMNS}
      FROM calculation_request {_WITH_EMAILS}
""".rstrip()  # noqa: S608 - constants only

_FIND = f"""{_SELECT}
     WHERE request.id = $1
       AND request.conveyancer_id = $2
       AND EXISTS (SELECT FROM active_conveyancer WHERE id = $2)
"""
_READ = f"""{_SELECT}
     WHERE request.id = ANY($1)
     ORDER BY request.id
"""
# A subquery, because with a join, a plan that is made for any page size may read all requests and e-mails.
_READ_PAGE = f"""{_SELECT}
     WHERE request.id = ANY(ARRAY(SELECT id
                                    FROM calculation_request
                                   WHERE id > $1
                                   ORDER BY id
                                   LIMIT $2))
     ORDER BY request.id
"""  # noqa: S608 - constants only
_READ_ERASED = f"""
    SELECT {_COLUMNS}
      FROM (SELECT *, 'SDLT_CALCULATION' AS request_type, NULL::bigint AS property_value,
                   NULL AS external_id, false AS calculation_fee_exempt
              FROM erased_request) {_WITH_EMAILS}
     WHERE request.id = $1
"""  # noqa: S608 - constants only
