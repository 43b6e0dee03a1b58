"""`reconcile`: reports discrepancies."""

from datetime import datetime
from uuid import UUID

import click

from service.command_line import connecting, parameters
from service.command_line.answering import Answer, answering, table
from service.identifiers import first_id_at
from worker import reconciliation


@click.command
@click.option("--since", type=parameters.time, metavar="TIME", help="Only requests stored since TIME.")
@answering
async def reconcile(*, since: datetime | None) -> Answer:
    """Find requests with a missing or overdue event or e-mail. The exit status is 1 if there is one."""
    first_id = first_id_at(since) if since else UUID(int=0)
    async with (
        connecting.postgres() as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        found = await reconciliation.find_discrepancies(connection, first_id)
    rows = [(each.name, each.count, each.meaning, ", ".join(each.uuids[:2])) for each in found]
    text = table(("discrepancy", "number", "meaning", "for example"), rows)
    return Answer(found, text, status=int(any(each.count for each in found)))
