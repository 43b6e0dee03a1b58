"""Corrections of stored requests by operators."""

from uuid import UUID

import msgspec

from service.calculation_requests import erased, reading, request_secrets, storing
from service.calculation_requests.model import RequestNotFound
from service.calculation_requests.request_secrets import SecretKeyRing
from service.operations import emails, operator_actions
from service.operations.operator_actions import Operator
from service.postgres.pool import Connection


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator changes. Each change makes a new secret: the link that was sent is dead."""

    action: str  # the words of the command
    by: Operator
    customer_email: str | None = None  # None: as before
    sends_email: bool = True


async def carry_out(connection: Connection, request_id: UUID, change: Change, *, keys: SecretKeyRing) -> None:
    """Change a request, and send its customer another e-mail. Raises RequestErased and RequestNotFound.

    Pending e-mails are cancelled, because one that is being sent has the old address and the dead link. The
    first e-mail, while request.created has not been consumed, will have the new ones.
    """
    async with connection.transaction():
        if not await reading.lock_all(connection, [request_id]):
            await erased.check(connection, request_id)
            raise RequestNotFound
        await connection.execute(
            """
            UPDATE calculation_request
               SET customer_email = coalesce($2, customer_email),
                   secret_salt = $3,
                   secret_key_id = $4,
                   updated_at = $5
             WHERE id = $1
            """,
            request_id,
            change.customer_email,
            request_secrets.new_salt(),
            keys.current_id,
            storing.now(),
        )
        await emails.cancel(connection, [request_id])
        added = await emails.add_again(connection, [request_id]) if change.sends_email else {}
        subject = added.get(request_id)
        await operator_actions.record(connection, change.action, [(request_id, subject)], change.by)
