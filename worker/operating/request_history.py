"""The events of a request, from its rows: the same ones, whenever they are made again."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from service.calculation_requests.model import CalculationRequest
from service.outbox.events import (
    SENT,
    Reason,
    RequestCalculated,
    RequestCreated,
    RequestEmailFailed,
    RequestEmailSent,
    RequestEvent,
)
from service.postgres.pool import Connection

EVENT_TYPES = tuple(event.type for event in SENT)


class Happening(msgspec.Struct, frozen=True):
    """That an event was written: the n-th of its request, at this time."""

    type: str
    sequence: int | None  # None in a row older than the column
    at: datetime


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows of a request and of its e-mail say of its events."""

    id: UUID
    created_at: datetime
    updated_at: datetime
    calculation_id: str | None
    calculation_sequence: int | None
    email_state: str | None
    email_sequence: int | None
    email_settled_at: datetime | None
    smtp_code: int | None
    reason: Reason | None

    def happenings(self) -> list[Happening]:
        """Return the events that were written about this request, in their order."""
        found = [Happening(RequestCreated.type, 1, self.created_at)]
        if self.calculation_id is not None:
            found.append(Happening(RequestCalculated.type, self.calculation_sequence, self.updated_at))
        if self.email_settled_at is not None:
            sent = self.email_state == "sent"
            kind = RequestEmailSent if sent else RequestEmailFailed
            known = sent or self.smtp_code is not None
            sequence = self.email_sequence if known else None
            found.append(Happening(kind.type, sequence, self.email_settled_at.replace(microsecond=0)))
        return sorted(found, key=lambda happening: happening.sequence or 2**31)

    def event(self, happening: Happening, request: CalculationRequest) -> RequestEvent:
        """Return an event of this history whose sequence is known."""
        facts = request.event_payload(sequence=happening.sequence or 0)
        match happening.type:
            case RequestCalculated.type:
                return RequestCalculated(**facts, calculation_id=self.calculation_id or "")
            case RequestEmailSent.type:
                return RequestEmailSent(**facts)
            case RequestEmailFailed.type:
                return RequestEmailFailed(**facts, reason=self._reason(), smtp_code=self.smtp_code or 0)
        return RequestCreated(**facts)

    def _reason(self) -> Reason:
        """Return why the e-mail ended unsent, also where its row is older than the column."""
        return self.reason or ("refused" if (self.smtp_code or 0) >= 500 else "gave_up")


async def read(connection: Connection, request_ids: Sequence[UUID]) -> list[History]:
    """Return the histories of these requests, in the order of their ids."""
    rows = await connection.fetch(
        """
        SELECT request.id, request.created_at, request.updated_at,
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
    return [History(**row) for row in rows]


async def read_page(connection: Connection, *, after: UUID, before: UUID, limit: int) -> list[History]:
    """Return the next histories in the order of the requests' ids, which is that of their creation."""
    rows = await connection.fetch(
        """
        SELECT request.id, request.created_at, request.updated_at,
               request.calculation_id, request.calculation_sequence,
               email.state AS email_state, email.event_sequence AS email_sequence,
               email.settled_at AS email_settled_at, email.smtp_code, email.reason
          FROM (SELECT id, created_at, updated_at, calculation_id, calculation_sequence
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
    return [History(**row) for row in rows]


def id_at(time: datetime) -> UUID:
    """Return the smallest id that a request of this time can have: ids are UUIDv7 (RFC 9562, section 5.7)."""
    return UUID(int=max(0, int(time.timestamp() * 1000)) << 80)
