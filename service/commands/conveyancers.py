"""`conveyancer`: the law firms that may use the service."""

from datetime import datetime

import asyncpg
import click

from service.calculation_requests import conveyancers
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, Operator, answering, on_record

conveyancer = click.Group("conveyancer", help="The law firms that may use the service.")


@conveyancer.command()
@click.argument("conveyancer_id", metavar="ID", type=parameters.line)
@click.option("--name", type=parameters.line, required=True, help="The name of the firm.")
@click.option(
    "--charges-calculation-fee/--no-charges-calculation-fee",
    default=None,
    help="Default: unchanged, or no fee for a new conveyancer.",
)
@on_record
async def add(
    conveyancer_id: str, name: str, by: Operator, *, charges_calculation_fee: bool | None
) -> Answer:
    """Register the firm that its access tokens name as ID, or change a registered firm's name and fee."""
    async with connecting.postgres() as connection, connecting.bounded_transaction(connection):
        before, after = await conveyancers.register(
            connection, conveyancer_id, name=name, charges_calculation_fee=charges_calculation_fee
        )
        change = " -> ".join(_terms(firm) for firm in (before, after) if firm)
        if before != after:
            await operator_actions.record(
                connection, "conveyancer add", [(None, change)], by, conveyancer_id=conveyancer_id
            )
    is_disabled = after["disabled_at"] is not None
    said = f"conveyancer {conveyancer_id} registered: {change}{', and still disabled' if is_disabled else ''}"
    return Answer({"id": conveyancer_id, "disabled": is_disabled}, said)


def _terms(firm: asyncpg.Record) -> str:
    return f"{firm['name']!r}, {'a' if firm['charges_calculation_fee'] else 'no'} calculation fee"


@conveyancer.command("list")
@answering
async def list_conveyancers() -> Answer:
    """Show every conveyancer, whether it charges a fee, and since when it is disabled."""
    async with connecting.postgres() as connection:
        return Answer.listing(await conveyancers.list_all(connection))


@conveyancer.command()
@click.option(
    "--month", type=click.DateTime(["%Y-%m"]), metavar="YYYY-MM", help="Default: the current month."
)
@answering
async def usage(month: datetime | None) -> Answer:
    """Count what each firm did in a month, in UTC. Requests that were erased since still count."""
    async with connecting.postgres() as connection:
        return Answer.listing(await conveyancers.count_requests(connection, month))


@conveyancer.command()
@click.argument("conveyancer_id", metavar="ID", type=parameters.line)
@on_record
async def disable(conveyancer_id: str, by: Operator) -> Answer:
    """Reject a conveyancer's access tokens from now on. Its customers' links keep working."""
    return await _set_disabled(conveyancer_id, by, disabled=True)


@conveyancer.command()
@click.argument("conveyancer_id", metavar="ID", type=parameters.line)
@on_record
async def enable(conveyancer_id: str, by: Operator) -> Answer:
    """Serve a disabled conveyancer again."""
    return await _set_disabled(conveyancer_id, by, disabled=False)


async def _set_disabled(conveyancer_id: str, by: Operator, *, disabled: bool) -> Answer:
    verb = "disable" if disabled else "enable"
    async with connecting.postgres() as connection, connecting.bounded_transaction(connection):
        if not await connection.fetchval(_SET_DISABLED, conveyancer_id, disabled):
            raise UnknownConveyancer
        action = f"conveyancer {verb}"
        await operator_actions.record(connection, action, [(None, None)], by, conveyancer_id=conveyancer_id)
    return Answer({"id": conveyancer_id, "disabled": disabled}, f"conveyancer {conveyancer_id} {verb}d")


_SET_DISABLED = """
    UPDATE conveyancer
       SET disabled_at = CASE WHEN $2 THEN coalesce(disabled_at, now()) END
     WHERE id = $1
    RETURNING true
"""
