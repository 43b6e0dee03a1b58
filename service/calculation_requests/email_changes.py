"""Changes to the e-mails of locked requests: how they end (sent, failed or cancelled), and adding new ones.

The worker ends e-mails, as sent or failed. Operators add and cancel them. Withdrawals and erasures cancel them.

The e-mail key of a request's first e-mail is the id of the request.created event that causes this e-mail.
For later e-mails a number, from 2 on, is appended. The Message-ID is made from the key.
"""

from collections.abc import Mapping, Sequence
from typing import Literal
from uuid import UUID

import msgspec

from service.calculation_requests.changing import LockedRequest
from service.identifiers import uuid_of
from service.outbox import events
from service.outbox.events import Reason, RequestCreated, RequestEmailFailed, RequestEmailSent
from service.postgres.pool import Connection


class EmailEnd(msgspec.Struct, frozen=True):
    """How a pending e-mail ended: it was sent, or failed for a reason. Cancelled ones failed, too."""

    email_key: str
    request_id: UUID
    reply: str | None  # the mail server's, or our own text
    reason: Reason | None = None  # None: sent
    smtp_code: int = 0
    traceparent: str | None = None

    @property
    def label(self) -> Literal["sent", "failed"]:
        """The final state of the e-mail."""
        return "sent" if self.reason is None else "failed"


async def announce_ends(
    connection: Connection, ends: Sequence[EmailEnd], requests: Mapping[UUID, LockedRequest]
) -> None:
    """Record and announce how pending e-mails ended. Their rows, and their *requests*, must be locked.

    Claims are not checked, because a reply counts even if another process has claimed the e-mail since.
    """
    if not ends:
        return
    for end in ends:
        request = requests[end.request_id]
        if end.reason is None:
            request.announce(RequestEmailSent, traceparent=end.traceparent)
        else:
            facts = {"reason": end.reason, "smtp_code": end.smtp_code}
            request.announce(RequestEmailFailed, traceparent=end.traceparent, **facts)
    await connection.execute(
        _END,
        [end.email_key for end in ends],
        [end.reply for end in ends],
        [None if end.reason is None else end.smtp_code for end in ends],
        [end.reason for end in ends],
        [requests[end.request_id].locked_at for end in ends],
    )


# Cancelling an e-mail is not counted as an attempt.
_END = """
    UPDATE email
       SET state = CASE WHEN ended.reason IS NULL THEN 'sent' ELSE 'failed' END,
           server_reply = coalesce(ended.server_reply, email.server_reply),
           attempts = attempts + (ended.reason IS DISTINCT FROM 'cancelled')::integer,
           claimed_by = NULL,
           settled_at = ended.at,
           smtp_code = ended.smtp_code,
           reason = ended.reason
      FROM unnest($1::text[], $2::text[], $3::integer[], $4::text[], $5::timestamptz[])
           AS ended (email_key, server_reply, smtp_code, reason, at)
     WHERE email.email_key = ended.email_key
"""


async def replace(connection: Connection, request: LockedRequest, *, sends: bool) -> str | None:
    """Cancel the pending e-mails of a request, and record that a new one is to be sent.

    Returns the new e-mail's key. If request.created has not been consumed, the new e-mail is the first one,
    and the consumer adds none. Without *sends*, no e-mail is sent, and None is returned.
    """
    # If a consumer is adding the first e-mail, `_add_first` waits until it has. So `cancel` sees that e-mail.
    if await _add_first(connection, [request.id]) and sends:
        return first_email_key(request.id)
    await cancel(connection, {request.id: request})
    if not sends:
        return None
    sent = await connection.fetch("SELECT email_key FROM email WHERE request_id = $1", request.id)
    another = await add_again(connection, [row["email_key"] for row in sent], {request.id: request})
    return another[request.id]


async def cancel(connection: Connection, requests: Mapping[UUID, LockedRequest]) -> dict[UUID, str]:
    """Cancel the pending e-mails of these requests. Returns their keys.

    First e-mails that no consumer has recorded yet are recorded and cancelled. An e-mail that a worker has
    claimed may still be sent, because the worker may have read the row already.
    """
    await _add_first(connection, list(requests))
    rows = await connection.fetch(
        """
        SELECT email_key, request_id, traceparent
          FROM email
         WHERE request_id = ANY($1)
           AND state = 'pending'
         ORDER BY email_key
           FOR UPDATE
        """,
        list(requests),
    )
    ends = [EmailEnd(**row, reply=None, reason="cancelled") for row in rows]
    await announce_ends(connection, ends, requests)
    return {end.request_id: end.email_key for end in ends}


def first_email_key(request_id: UUID) -> str:
    """Return the e-mail key of a request's first e-mail."""
    return events.event_id(uuid_of(request_id), RequestCreated.type, 1)


async def _add_first(connection: Connection, request_ids: Sequence[UUID]) -> bool:
    """Add the missing first e-mails of locked requests. Returns False if none was missing."""
    added = await connection.fetch(
        """
        INSERT INTO email (email_key, request_id)
        SELECT email_key, request_id
          FROM unnest($1::text[], $2::uuid[]) AS first (email_key, request_id)
         ORDER BY email_key -- as a consumer does: otherwise the two could deadlock
        ON CONFLICT (email_key) DO NOTHING
        RETURNING true
        """,
        [first_email_key(request_id) for request_id in request_ids],
        request_ids,
    )
    return bool(added)


async def add_again(
    connection: Connection, email_keys: Sequence[str], requests: Mapping[UUID, LockedRequest]
) -> dict[UUID, str]:
    """Add one new e-mail to each of these requests. Returns the new keys.

    A request gets none if it was withdrawn, has a pending e-mail, or its last e-mail is not in *email_keys*.
    """
    rows = await connection.fetch(
        """
        INSERT INTO email (email_key, request_id)
        SELECT min(email_key) || '.' || (count(*) + 1), request_id
          FROM email
         WHERE request_id = ANY($2)
         GROUP BY request_id
        HAVING bool_and(state <> 'pending')
           AND (array_agg(email_key ORDER BY length(email_key) DESC, email_key DESC))[1] = ANY($1)
        RETURNING request_id, email_key
        """,
        email_keys,
        [each.id for each in requests.values() if each.withdrawn_at is None],
    )
    return {row["request_id"]: row["email_key"] for row in rows}
