"""`reconcile`: reports discrepancies, and repairs requests without an e-mail."""

from datetime import datetime
from uuid import UUID

import click
import msgspec

from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, answering, on_record, table
from service.command_line.operator_actions import Operator
from service.identifiers import first_id_at
from service.postgres.pool import Connection
from worker import reconciliation
from worker.commands import replay
from worker.reconciliation import Discrepancy


class Reconciliation(msgspec.Struct, frozen=True):
    """Every discrepancy, including those with a count of 0."""

    discrepancies: list[Discrepancy]
    announced_again: int = 0  # the number of repaired requests


@click.command
@click.option("--since", type=parameters.time, metavar="TIME", help="Only requests stored since TIME.")
@click.option("--repair", is_flag=True, help="Publish request.created again for requests without an e-mail.")
@answering
@on_record
async def reconcile(*, since: datetime | None, repair: bool, by: Operator) -> Answer:
    """Compare requests, events, e-mails and calculations. The exit status is 1 if there is a discrepancy."""
    first_id = first_id_at(since) if since else UUID(int=0)
    async with connecting.postgres() as connection:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            discrepancies = await reconciliation.find_discrepancies(connection, first_id)
        announced = await announce_again(connection, first_id, by) if repair else 0
    rows = [(each.name, each.count, each.meaning, ", ".join(each.uuids[:2])) for each in discrepancies]
    text = table(("discrepancy", "number", "meaning", "for example"), rows)
    if repair:
        text += f"\n\n{announced} requests without an e-mail announced again"
    return Answer(
        Reconciliation(discrepancies, announced), text, status=int(any(each.count for each in discrepancies))
    )


async def announce_again(connection: Connection, first_id: UUID, by: Operator) -> int:
    """Publish request.created again for every `request_without_email`. Returns the number of requests.

    The repeated event has the same id, so an e-mail that was only late is not sent twice.
    """
    request_ids = await reconciliation.read_ids_without_email(connection, first_id)
    if not request_ids:
        return 0
    subject = f"request.created of {len(request_ids)} requests"
    await operator_actions.record(connection, "reconcile --repair", [(None, subject)], by)
    return (await replay.replay(connection, dict.fromkeys(request_ids, (1,)))).requests
