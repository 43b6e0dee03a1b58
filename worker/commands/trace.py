"""`trace`: one request with its events, e-mails and calculation."""

from uuid import UUID

import click

from service.calculation_requests.model import RequestNotFound
from service.command_line import connecting, parameters
from service.command_line.answering import Answer, answering
from worker.commands import emails as emails_command
from worker.commands import outbox
from worker.commands.emails import Choice


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
        newest_first = await emails_command.read(connection, Choice(request_id=request_id))
        lists = {
            "request": Answer.listing([stored]),
            "events": Answer.listing(await outbox.read(connection, request_id=request_id)),
            "emails": Answer.listing(newest_first[::-1]),
            "actions": Answer.listing(await connection.fetch(_ACTIONS, request_id)),
        }
    data = {name: listing.data for name, listing in lists.items()} | {"request": dict(stored)}
    return Answer(data, "\n\n".join(f"{name}:\n{listing.text}" for name, listing in lists.items()))


# The request may have been erased. It is shown without personal data and secrets.
_FIND = """
    SELECT id AS uuid, conveyancer_id AS tenant, created_at AS stored_at, calculation_id, withdrawn_at,
           NULL::timestamptz AS erased_at, refused_calculation_id AS refused_calculation
      FROM calculation_request
     WHERE id = $1
     UNION ALL
    SELECT id, conveyancer_id, created_at, calculation_id, NULL, erased_at, NULL
      FROM erased_request
     WHERE id = $1
"""

_ACTIONS = """
    SELECT action, subject, operator, note, at
      FROM operator_action
     WHERE request_id = $1
     ORDER BY id
"""
