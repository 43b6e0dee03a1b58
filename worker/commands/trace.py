"""`trace`: one request with its events, e-mails and calculation."""

from datetime import datetime
from uuid import UUID

import click
import msgspec

from service.calculation_requests.model import RequestNotFound
from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, answering
from service.command_line.operator_actions import OperatorAction
from service.identifiers import uuid_of
from worker.commands import emails as emails_command
from worker.commands import outbox
from worker.commands.emails import Choice, LedgerEmail
from worker.commands.outbox import Event


class TracedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request, which may have been erased, without personal data or secrets."""

    uuid: str
    tenant: str
    stored_at: datetime
    calculation_id: str | None
    withdrawn_at: datetime | None
    erased_at: datetime | None
    refused_calculation: str | None  # the latest that was refused, because there is another, or it was erased
    refused_at: datetime | None


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known about the progress of a request."""

    request: TracedRequest
    events: list[Event]
    emails: list[LedgerEmail]
    actions: list[OperatorAction]


@click.command
@click.argument("request_id", type=parameters.uuid, metavar="UUID")
@answering
async def trace(request_id: UUID) -> Answer:
    """Show the history of one request: events, e-mails, calculation, operators' actions, and erasure."""
    async with (
        connecting.postgres() as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        stored = await connection.fetchrow(_FIND, request_id)
        if stored is None:
            raise RequestNotFound
        newest, _ = await emails_command.read(connection, Choice(request_id=request_id))
        found = Trace(
            request=TracedRequest(uuid=uuid_of(request_id), **stored),
            events=await outbox.read(connection, request_id=request_id),
            emails=newest[::-1],
            actions=await operator_actions.read(connection, request_id),
        )
    lists = msgspec.structs.asdict(found) | {"request": [found.request]}
    return Answer(found, "\n\n".join(f"{name}:\n{Answer.listing(each).text}" for name, each in lists.items()))


_FIND = """
    SELECT tenant, stored_at, request.calculation_id, withdrawn_at, erased_at,
           refused.calculation_id AS refused_calculation, refused_at
      FROM (SELECT id, conveyancer_id AS tenant, created_at AS stored_at, calculation_id, withdrawn_at,
                   NULL::timestamptz AS erased_at
              FROM calculation_request
             UNION ALL
            SELECT id, conveyancer_id, created_at, calculation_id, NULL, erased_at
              FROM erased_request) AS request
      LEFT JOIN refused_calculation AS refused
        ON refused.request_id = id
     WHERE id = $1
"""
