"""`trace`: one request with its events, e-mails and calculation."""

from collections.abc import Iterable
from datetime import datetime
from uuid import UUID

import click
import msgspec

from service.calculation_requests import event_history
from service.calculation_requests.event_history import RecordedEvent
from service.calculation_requests.model import RequestNotFound
from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, answering, cell, table
from service.command_line.operator_actions import OperatorAction
from service.identifiers import uuid_of
from service.outbox.events import RequestCalculated, RequestCreated, event_id
from service.postgres.pool import Connection
from worker.commands import emails as emails_command
from worker.commands import outbox
from worker.commands.emails import Choice, LedgerEmail
from worker.commands.outbox import Event

_MOST_EMAILS = 100


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known about the progress of a request, without personal data or secrets."""

    uuid: str
    tenant: str
    stored_at: datetime
    calculation_id: str | None
    calculated_at: datetime | None
    erased_at: datetime | None
    emails: list[LedgerEmail]
    events: list[Event]
    actions: list[OperatorAction]
    conclusion: str


@click.command
@click.argument("request_id", type=parameters.uuid, metavar="UUID")
@answering
async def trace(request_id: UUID) -> Answer:
    """Show the history of one request: events, e-mails, calculation, operators' actions, and erasure."""
    async with (
        connecting.postgres() as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        found = await _trace(connection, request_id)
    return Answer(found, _as_text(found))


async def _trace(connection: Connection, request_id: UUID) -> Trace:
    """Return the progress of a request. Raises RequestNotFound."""
    stored = await connection.fetchrow(_FIND, request_id)
    if stored is None:
        raise RequestNotFound
    newest = await emails_command.read(connection, Choice(request_id=request_id), limit=_MOST_EMAILS)
    emails = newest[::-1]
    recorded = await event_history.read_recorded(connection, request_id, created_at=stored["stored_at"])
    undelivered = await outbox.read_undelivered(connection, request_id=request_id)
    published = [_published(uuid_of(request_id), each) for each in recorded]
    events = {event.event_id: event for event in (*published, *undelivered)}
    calculated = [each.at for each in recorded if each.type == RequestCalculated.type]
    return Trace(
        **stored,
        uuid=uuid_of(request_id),
        calculated_at=calculated[0] if calculated else None,
        emails=emails,
        events=sorted(events.values(), key=lambda event: event.sequence),
        actions=await operator_actions.read(connection, request_id),
        conclusion="The request was erased."
        if stored["erased_at"]
        else _conclude(stored["calculation_id"], emails[-1] if emails else None, events.values()),
    )


_FIND = """
    SELECT conveyancer_id AS tenant, created_at AS stored_at, calculation_id, NULL::timestamptz AS erased_at
      FROM calculation_request
     WHERE id = $1
    UNION ALL
    SELECT conveyancer_id, created_at, calculation_id, erased_at
      FROM erased_request
     WHERE id = $1
"""


def _published(uuid: str, recorded: RecordedEvent) -> Event:
    key = event_id(uuid, recorded.type, recorded.sequence)
    return Event(key, recorded.type, recorded.sequence, "published", recorded.at)


def _conclude(calculation_id: str | None, email: LedgerEmail | None, events: Iterable[Event]) -> str:
    """Return one sentence about what the request is waiting for."""
    created = next(event for event in events if event.type == RequestCreated.type)
    if calculation_id is not None:
        return "The request has its calculation."
    if email is None and created.state != "published":
        return f"request.created has not been published: it is {created.state}."
    if email is None:
        return (
            "request.created was published, but there is no e-mail yet: see the queue and its dead letters."
        )
    return {
        "pending": "The mail server has not accepted the e-mail yet.",
        "failed": f"The e-mail has failed: {email.reason}.",
        "sent": "The mail server has accepted the e-mail. There is no calculation yet.",
    }[email.state]


def _as_text(found: Trace) -> str:
    lines = [("stored", found.stored_at, f"by {found.tenant}")]
    lines += [(event.type, event.written_at, _describe_event(event)) for event in found.events]
    lines += [
        ("e-mail", email.settled_at or email.created_at, _describe_email(email, found.uuid))
        for email in found.emails
    ]
    lines += [(action.action, action.at, _describe_action(action)) for action in found.actions]
    if found.calculated_at is not None:
        lines.append(("calculation", found.calculated_at, cell(found.calculation_id)))
    if found.erased_at is not None:
        lines.append(("erased", found.erased_at, "-"))
    lines.sort(key=lambda line: line[1])
    return f"{found.uuid}\n{found.conclusion}\n\n" + table(("what", "when", "state"), lines)


def _describe_event(event: Event) -> str:
    text = f"event {event.sequence}, {event.state}"
    if event.attempts:
        text += f" after {event.attempts} attempts"
    if event.next_attempt_at is not None:
        text += f", next at {cell(event.next_attempt_at)}"
    return text + (f": {event.last_error}" if event.last_error else "")


def _describe_action(action: OperatorAction) -> str:
    subject = f"{action.subject}, " if action.subject else ""
    return f"{subject}by {action.operator}" + (f": {action.note}" if action.note else "")


def _describe_email(email: LedgerEmail, uuid: str) -> str:
    key = email.key.removeprefix(f"{uuid}.")  # A short key leaves room for the reply.
    text = f"{key}, {email.state}, {email.attempts} attempts"
    if email.next_attempt_at is not None:
        text += f", next at {cell(email.next_attempt_at)}"
    return text + (f": {email.server_reply}" if email.server_reply else "")
