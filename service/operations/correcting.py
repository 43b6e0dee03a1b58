"""Corrections of stored requests by operators."""

from uuid import UUID

import msgspec

from service.calculation_requests import erased, reading, request_secrets, storing
from service.calculation_requests.model import RequestNotFound
from service.calculation_requests.request_secrets import SecretKeyRing
from service.operations import emails, operator_actions
from service.operations.operator_actions import Operator
from service.postgres import loans
from service.postgres.pool import Connection


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator changes. Each change makes a new secret: the link that was sent is dead."""

    action: str  # the words of the command
    by: Operator
    customer_email: str | None = None  # None: as before
    sends_email: bool = True


class Changed(msgspec.Struct, frozen=True):
    """What came of a change: the key of the e-mail that the customer gets now, if any."""

    email: str | None


async def carry_out(
    connection: Connection, request_id: UUID, change: Change, *, keys: SecretKeyRing
) -> Changed | None:
    """Change a request, and send its customer another e-mail. Returns None if it has this address already.

    Pending e-mails are cancelled, because they may have been claimed with the old address and the dead link.

    Raises RequestErased and RequestNotFound.
    """
    async with loans.bounded_transaction(connection):
        if not await reading.lock_all(connection, [request_id]):
            await erased.check(connection, request_id)
            raise RequestNotFound
        changed = await connection.fetchval(
            """
            UPDATE calculation_request
               SET customer_email = coalesce($2, customer_email),
                   secret_salt = $3,
                   secret_key_id = $4,
                   updated_at = $5
             WHERE id = $1
               AND customer_email IS DISTINCT FROM $2
            RETURNING true
            """,
            request_id,
            change.customer_email,
            request_secrets.new_salt(),
            keys.current_id,
            storing.now(),
        )
        if not changed:
            return None
        key = await emails.replace(connection, request_id, sends=change.sends_email)
        await operator_actions.record(connection, change.action, [(request_id, key)], change.by)
    return Changed(key)
