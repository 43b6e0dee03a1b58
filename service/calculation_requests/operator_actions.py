"""The record of what operators changed: who, when and why."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from service.postgres.pool import Connection


class Operator(msgspec.Struct, frozen=True):
    """The operator who runs a command, and why."""

    name: str
    reason: str | None


class OperatorAction(msgspec.Struct, frozen=True):
    """A change that an operator made to a request."""

    action: str  # the words of the command
    operator: str
    reason: str | None
    at: datetime


async def record(connection: Connection, request_ids: Sequence[UUID], action: str, by: Operator) -> None:
    """Record a change of these requests, in the caller's transaction."""
    await connection.execute(
        """
        INSERT INTO operator_action (request_id, action, operator, reason)
        SELECT request_id, $2, $3, $4
          FROM unnest($1::uuid[]) AS request_id
        """,
        request_ids,
        action,
        by.name,
        by.reason,
    )


async def read(connection: Connection, request_id: UUID) -> list[OperatorAction]:
    """Return the changes of a request, oldest first."""
    rows = await connection.fetch(
        """
        SELECT action, operator, reason, at
          FROM operator_action
         WHERE request_id = $1
         ORDER BY id
        """,
        request_id,
    )
    return [OperatorAction(*row) for row in rows]
