"""The events of a request, from its rows: an event that is made again has the same id and the same body."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from service.calculation_requests.model import CalculationRequest
from service.outbox.events import (
    Reason,
    RequestCalculated,
    RequestCreated,
    RequestEmailFailed,
    RequestEmailSent,
    RequestEvent,
)
from service.postgres.pool import Connection


class RecordedEvent(msgspec.Struct, frozen=True):
    """An event that was written: its type, its number within the request, and its time."""

    type: str
    sequence: int
    at: datetime


class EventHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows of a request and of its e-mail say about its events.

    Everything an event says is in a row, its time and sequence included. Only the trace is not.
    """

    id: UUID
    conveyancer_id: str
    sequence: int
    created_at: datetime
    updated_at: datetime
    calculation_id: str | None
    calculation_sequence: int | None
    email_state: str | None
    email_sequence: int | None
    email_settled_at: datetime | None
    smtp_code: int | None
    reason: Reason | None

    def recorded_events(self) -> list[RecordedEvent]:
        """Return the events that were written about this request, in order."""
        found = [RecordedEvent(RequestCreated.type, 1, self.created_at)]
        if self.calculation_sequence is not None:
            found.append(RecordedEvent(RequestCalculated.type, self.calculation_sequence, self.updated_at))
        if self.email_sequence is not None and self.email_settled_at is not None:
            event = RequestEmailSent if self.email_state == "sent" else RequestEmailFailed
            found.append(
                RecordedEvent(event.type, self.email_sequence, self.email_settled_at.replace(microsecond=0))
            )
        return sorted(found, key=lambda event: event.sequence)

    def event(self, event: RecordedEvent, request: CalculationRequest) -> RequestEvent:
        """Return an event of this history."""
        facts = request.event_payload(sequence=event.sequence)
        match event.type:
            case RequestCalculated.type:
                return RequestCalculated(**facts, calculation_id=self.calculation_id or "")
            case RequestEmailSent.type:
                return RequestEmailSent(**facts)
            case RequestEmailFailed.type:
                return RequestEmailFailed(**facts, reason=self._reason(), smtp_code=self.smtp_code or 0)
        return RequestCreated(**facts)

    def _reason(self) -> Reason:
        """Return why the e-mail failed. Rows older than version 4 of the schema have a code alone."""
        return self.reason or ("refused" if (self.smtp_code or 0) >= 500 else "gave_up")


async def read(connection: Connection, request_ids: Sequence[UUID]) -> list[EventHistory]:
    """Return the histories of these requests, in the order of their ids."""
    rows = await connection.fetch(
        """
        SELECT request.id, request.conveyancer_id, request.sequence, request.created_at, request.updated_at,
               request.calculation_id, request.calculation_sequence,
               email.state AS email_state, email.event_sequence AS email_sequence,
               email.settled_at AS email_settled_at, email.smtp_code, email.reason
          FROM calculation_request AS request
          LEFT JOIN email
            ON email.request_id = request.id
         WHERE request.id = ANY($1)
         ORDER BY request.id
        """,
        request_ids,
    )
    return [EventHistory(**row) for row in rows]


async def read_page(connection: Connection, *, after: UUID, before: UUID, limit: int) -> list[EventHistory]:
    """Return the next histories in the order of the requests' ids, which is the order of creation."""
    rows = await connection.fetch(
        """
        SELECT request.id, request.conveyancer_id, request.sequence, request.created_at, request.updated_at,
               request.calculation_id, request.calculation_sequence,
               email.state AS email_state, email.event_sequence AS email_sequence,
               email.settled_at AS email_settled_at, email.smtp_code, email.reason
          FROM (SELECT id, conveyancer_id, sequence, created_at, updated_at,
                       calculation_id, calculation_sequence
                  FROM calculation_request
                 WHERE id > $1
                   AND id < $2
                 ORDER BY id
                 LIMIT $3) AS request
          LEFT JOIN email
            ON email.request_id = request.id
         ORDER BY request.id
        """,
        after,
        before,
        limit,
    )
    return [EventHistory(**row) for row in rows]
