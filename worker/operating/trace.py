"""Where one request stands: from its row to its events, the e-mail's reply and the calculation."""

import re
from datetime import datetime
from uuid import UUID

import msgspec

from service.calculation_requests.model import RequestNotFound
from service.identifiers import uuid_of
from service.outbox.events import RequestCreated
from service.postgres.pool import Connection
from worker.operating import outbox_statements, request_history
from worker.operating.outbox_statements import EventKey, UndeliveredEvent
from worker.operating.request_history import History
from worker.operating.tables import cell, table

_ADDRESS = re.compile(r"[^\s<>@]+@[^\s<>@]+")


class EmailStanding(msgspec.Struct, frozen=True, kw_only=True):
    """How far the e-mail to the customer is. Addresses are left out of the mail server's reply."""

    state: str
    attempts: int
    created_at: datetime
    next_attempt_at: datetime | None
    settled_at: datetime | None
    reason: str | None
    server_reply: str | None


class EventStanding(msgspec.Struct, frozen=True, kw_only=True):
    """How far one event is: published, or one of the states of what has not left."""

    event_id: str
    type: str
    sequence: int | None
    written_at: datetime
    state: str
    attempts: int = 0
    last_error: str | None = None
    next_attempt_at: datetime | None = None
    parked_at: datetime | None = None


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of where a request stands: nothing of the customer, and no secret."""

    uuid: str
    tenant: str
    stored_at: datetime
    sequence: int
    calculation_id: str | None
    calculated_at: datetime | None
    email: EmailStanding | None
    events: list[EventStanding]
    conclusion: str


async def trace(connection: Connection, request_id: UUID) -> Trace:
    """Return where a request stands. Raises RequestNotFound."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        row = await read_request(connection, request_id)
        email = await read_email(connection, request_id)
        undelivered = await outbox_statements.read_of_request(connection, request_id)
        [history, *_] = await request_history.read(connection, [request_id])
    events = _standings(history, undelivered)
    calculation_id = history.calculation_id
    return Trace(
        uuid=uuid_of(request_id),
        tenant=row[0],
        stored_at=history.created_at,
        sequence=row[1],
        calculation_id=calculation_id,
        calculated_at=history.updated_at if calculation_id is not None else None,
        email=email,
        events=events,
        conclusion=_conclude(calculation_id, email, events),
    )


async def read_request(connection: Connection, request_id: UUID) -> tuple[str, int]:
    """Return the tenant and the sequence of a request. Raises RequestNotFound."""
    row = await connection.fetchrow(
        """
        SELECT conveyancer_id, sequence
          FROM calculation_request
         WHERE id = $1
        """,
        request_id,
    )
    if row is None:
        raise RequestNotFound
    return row["conveyancer_id"], row["sequence"]


async def read_email(connection: Connection, request_id: UUID) -> EmailStanding | None:
    """Return how far the e-mail of a request is; None when there is none yet."""
    row = await connection.fetchrow(
        """
        SELECT state, attempts, created_at, settled_at, reason, server_reply,
               CASE WHEN state = 'pending' THEN next_attempt_at END AS next_attempt_at
          FROM email
         WHERE request_id = $1
        """,
        request_id,
    )
    if row is None:
        return None
    reply = row["server_reply"]
    return EmailStanding(**{**row, "server_reply": reply and _ADDRESS.sub("[address]", reply)})


def _standings(history: History, undelivered: list[UndeliveredEvent]) -> list[EventStanding]:
    """Return every event that the rows or the outbox know of, in order."""
    found: dict[str, EventStanding] = {}
    for happening in history.happenings():
        key = EventKey(history.id, happening.type, happening.sequence or 0)
        event_id = key.event_id if happening.sequence else f"{uuid_of(history.id)}.{happening.type}"
        found[event_id] = EventStanding(
            event_id=event_id,
            type=happening.type,
            sequence=happening.sequence,
            written_at=happening.at,
            state="published",
        )
    for event in undelivered:
        found[event.event_id] = EventStanding(
            event_id=event.event_id,
            type=event.type,
            sequence=event.sequence,
            written_at=event.created_at,
            state=event.state,
            attempts=event.attempts,
            last_error=event.last_error,
            next_attempt_at=event.next_attempt_at,
            parked_at=event.parked_at,
        )
    return sorted(found.values(), key=lambda event: event.sequence or 2**31)


def _conclude(calculation_id: str | None, email: EmailStanding | None, events: list[EventStanding]) -> str:
    """Return in one sentence what the request waits for."""
    created = next(event for event in events if event.type == RequestCreated.type)
    if calculation_id is not None:
        return "It has its calculation."
    if email is None and created.state != "published":
        return f"request.created has not left for RabbitMQ: it is {created.state}."
    if email is None:
        return (
            "request.created was published, and no e-mail is noted yet: see the queue and its dead letters."
        )
    return {
        "pending": "The e-mail has yet to be accepted by the mail server.",
        "failed": f"The e-mail ended unsent: {email.reason or 'refused, or given up'}.",
        "sent": "The mail server has the e-mail; no calculation has come yet.",
    }[email.state]


def described(trace: Trace) -> str:
    """Return a trace as text for people."""
    lines = [("stored", trace.stored_at, f"by {trace.tenant}")]
    lines += [(event.type, event.written_at, _describe_event(event)) for event in trace.events]
    if trace.email is not None:
        lines.append(
            ("e-mail", trace.email.settled_at or trace.email.created_at, _describe_email(trace.email))
        )
    if trace.calculated_at is not None:
        lines.append(("calculation", trace.calculated_at, cell(trace.calculation_id)))
    lines.sort(key=lambda line: line[1])
    return f"{trace.uuid}\n{trace.conclusion}\n\n" + table(("what", "when", "state"), lines)


def _describe_event(event: EventStanding) -> str:
    said = event.state if event.sequence is None else f"event {event.sequence}, {event.state}"
    if event.attempts:
        said += f" after {event.attempts} attempts"
    if event.parked_at is not None:
        said += f" since {cell(event.parked_at)}"
    if event.next_attempt_at is not None:
        said += f", next at {cell(event.next_attempt_at)}"
    return said + (f": {event.last_error}" if event.last_error else "")


def _describe_email(email: EmailStanding) -> str:
    said = f"{email.state}, {email.attempts} attempts"
    if email.next_attempt_at is not None:
        said += f", next at {cell(email.next_attempt_at)}"
    return said + (f": {email.server_reply}" if email.server_reply else "")
