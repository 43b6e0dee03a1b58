"""The statements of operator commands on the ledger of e-mails."""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple
from uuid import UUID

import msgspec

from service.postgres.pool import Connection

State = Literal["pending", "sent", "failed"]

_ADDRESS = re.compile(r"[^\s<>@]+@[^\s<>@]+")


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which e-mails: a field that is None selects all. The time is their end, or else their beginning."""

    states: Sequence[State]
    request_id: UUID | None = None
    smtp_code: int | None = None  # of the mail server's last reply
    since: datetime | None = None
    until: datetime | None = None


class LedgerEmail(msgspec.Struct, frozen=True, kw_only=True):
    """An e-mail to a customer. Addresses are removed from the mail server's reply."""

    key: str
    state: State
    attempts: int
    created_at: datetime
    next_attempt_at: datetime | None
    settled_at: datetime | None
    reason: str | None
    server_reply: str | None


class EmailKey(NamedTuple):
    """What identifies an e-mail, and its request."""

    key: str
    request_id: UUID


async def read(connection: Connection, selection: Selection, *, limit: int) -> list[LedgerEmail]:
    """Return the newest of the selected e-mails, newest first."""
    rows = await connection.fetch(
        f"""
        SELECT event_id AS key, state, attempts, created_at, settled_at, reason, server_reply,
               CASE WHEN state = 'pending' THEN next_attempt_at END AS next_attempt_at
          FROM email
         WHERE {_SELECTED}
         ORDER BY created_at DESC, event_id DESC
         LIMIT $6
        """,  # noqa: S608 - constants only
        *_arguments(selection),
        limit,
    )
    return [_without_addresses(LedgerEmail(**row)) for row in rows]


async def find_delayed(
    connection: Connection, selection: Selection, *, after: str, limit: int
) -> list[EmailKey]:
    """Return the next of those selected that wait for their time, and lock them in a transaction.

    Those that a process is sending, or that are being changed, are left out.
    """
    rows = await connection.fetch(
        f"""
        SELECT event_id, request_id
          FROM email
         WHERE {_SELECTED}
           AND event_id > $6
           AND claimed_by IS NULL
           AND next_attempt_at > now()
         ORDER BY event_id
         LIMIT $7
           FOR UPDATE SKIP LOCKED
        """,  # noqa: S608 - constants only
        *_arguments(selection),
        after,
        limit,
    )
    return [EmailKey(*row) for row in rows]


async def make_due(connection: Connection, found: Sequence[EmailKey]) -> None:
    """Make locked e-mails due now."""
    await connection.execute(
        """
        UPDATE email
           SET next_attempt_at = now()
         WHERE event_id = ANY($1)
        """,
        [each.key for each in found],
    )


async def find_ended(
    connection: Connection, selection: Selection, *, after: str, limit: int
) -> list[EmailKey]:
    """Return the next of those selected that are the last e-mail of their request.

    One that an operator cancelled is left out unless its request is selected by name, and one of an erased
    request always.
    """
    rows = await connection.fetch(
        f"""
        SELECT event_id, request_id
          FROM email
         WHERE {_SELECTED}
           AND event_id > $6
           AND ($2::uuid IS NOT NULL OR reason IS DISTINCT FROM 'cancelled')
           AND EXISTS (SELECT
                         FROM calculation_request AS request
                        WHERE request.id = email.request_id)
           AND NOT EXISTS (SELECT
                             FROM email AS later
                            WHERE later.request_id = email.request_id
                              AND (length(later.event_id), later.event_id)
                                  > (length(email.event_id), email.event_id))
         ORDER BY event_id
         LIMIT $7
        """,  # noqa: S608 - constants only
        *_arguments(selection),
        after,
        limit,
    )
    return [EmailKey(*row) for row in rows]


_SELECTED = """state = ANY($1)
           AND ($2::uuid IS NULL OR request_id = $2)
           AND ($3::integer IS NULL OR smtp_code = $3 OR server_reply LIKE $3::text || ' %')
           AND ($4::timestamptz IS NULL OR coalesce(settled_at, created_at) >= $4)
           AND ($5::timestamptz IS NULL OR coalesce(settled_at, created_at) < $5)"""


def _arguments(selection: Selection) -> tuple[Any, ...]:
    return msgspec.structs.astuple(selection)


def _without_addresses(email: LedgerEmail) -> LedgerEmail:
    reply = email.server_reply
    return msgspec.structs.replace(email, server_reply=reply and _ADDRESS.sub("[address]", reply))
