"""`reconcile`: reports discrepancies."""

import click

from service.command_line import connecting, parameters
from service.command_line.answering import Answer, answering
from worker import reconciliation


@click.command
@click.option("--since", type=parameters.time, default="1971-01-01", metavar="TIME", help="Only since TIME.")
@answering
async def reconcile(*, since: parameters.Time) -> Answer:
    """Find requests with a missing or overdue event or e-mail. The exit status is 1 if there is one."""
    async with connecting.postgres() as connection:
        found = await reconciliation.find_discrepancies(connection, await parameters.at(connection, since))
    return Answer.listing(found, status=int(any(each["requests"] for each in found)))
