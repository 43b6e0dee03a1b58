"""Disabling a conveyancer, and enabling it again."""

from service.calculation_requests.conveyancers import UnknownConveyancer
from service.operations import operator_actions
from service.operations.operator_actions import Operator
from service.postgres import loans
from service.postgres.pool import Connection


async def set_disabled(connection: Connection, conveyancer_id: str, by: Operator, *, disabled: bool) -> None:
    """Disable a conveyancer, or enable it again. Raises UnknownConveyancer if it is not registered.

    Its access tokens then open no request, and its API keys nothing. Its customers' links stay open.
    """
    async with loans.bounded_transaction(connection):
        before = await connection.fetchrow(
            "SELECT disabled_at FROM conveyancer WHERE id = $1 FOR NO KEY UPDATE", conveyancer_id
        )
        if before is None:
            raise UnknownConveyancer
        if (before["disabled_at"] is not None) == disabled:
            return
        await connection.execute(
            """
            UPDATE conveyancer
               SET disabled_at = CASE WHEN $2 THEN now() END
             WHERE id = $1
            """,
            conveyancer_id,
            disabled,
        )
        action = "conveyancer disable" if disabled else "conveyancer enable"
        await operator_actions.record_of_conveyancer(connection, action, conveyancer_id, by)
