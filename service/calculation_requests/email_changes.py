"""Changes to the e-mails of locked requests: how they end (sent, failed or cancelled), and adding new ones.

The worker ends e-mails, as sent or failed. Operators cancel and add e-mails; erasing a request cancels them.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple
from uuid import UUID

import msgspec

from service.calculation_requests.changing import LockedRequest
from service.identifiers import uuid_of
from service.outbox.events import Reason, RequestEmailFailed, RequestEmailSent
from service.postgres.pool import Connection

Kind = Literal["invitation"]  # It has the link. worker/mail/message.py says what each kind is.


class EmailId(NamedTuple):
    """Identifies an e-mail. The numbers of a request's e-mails begin with 1, for request.created."""

    request_id: UUID
    number: int
    kind: Kind

    @property
    def key(self) -> str:
        """The e-mail key, for operators, logs and the Message-ID. It is never parsed."""
        return f"{uuid_of(self.request_id)}.{self.kind}.{self.number}"


class EmailEnd(msgspec.Struct, frozen=True):
    """How an e-mail ended: it was sent, or failed for a reason. Cancelled and bounced ones failed, too."""

    id: EmailId
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
    """Record and announce how e-mails ended: pending ones or, if they have bounced, sent ones.

    Their rows, and their *requests*, must be locked. Claims are not checked, because a reply counts even if
    another process has claimed the e-mail since.
    """
    if not ends:
        return
    for end in ends:
        request, email = requests[end.id.request_id], {"email": end.id.number, "kind": end.id.kind}
        if end.reason is None:
            request.announce(RequestEmailSent, traceparent=end.traceparent, **email)
        else:
            facts = {"reason": end.reason, "smtp_code": end.smtp_code}
            request.announce(RequestEmailFailed, traceparent=end.traceparent, **email, **facts)
    await connection.execute(
        _END,
        [end.id.request_id for end in ends],
        [end.id.number for end in ends],
        [end.reply for end in ends],
        [None if end.reason is None else end.smtp_code for end in ends],
        [end.reason for end in ends],
        [requests[end.id.request_id].locked_at for end in ends],
    )


# A cancellation is no attempt, and a bounce follows an attempt that was counted.
_END = """
    UPDATE email
       SET state = CASE WHEN ended.reason IS NULL THEN 'sent' ELSE 'failed' END,
           server_reply = coalesce(ended.server_reply, email.server_reply),
           attempts = attempts + (coalesce(ended.reason, '') NOT IN ('cancelled', 'bounced'))::integer,
           claimed_by = NULL,
           settled_at = ended.at,
           smtp_code = ended.smtp_code,
           reason = ended.reason
      FROM unnest($1::uuid[], $2::integer[], $3::text[], $4::integer[], $5::text[], $6::timestamptz[])
           AS ended (request_id, number, server_reply, smtp_code, reason, at)
     WHERE (email.request_id, email.number) = (ended.request_id, ended.number)
       AND email.request_id = ANY($1) -- so that a plan made while the table was empty uses the index
"""


async def replace(connection: Connection, request: LockedRequest, *, sends: bool) -> EmailId | None:
    """Cancel the pending e-mails of a request, and record that a new invitation is to be sent.

    Returns the new e-mail. If request.created has not been consumed, the new e-mail is the first one, and the
    consumer adds none. Without *sends*, no e-mail is sent, and None is returned.
    """
    # If a consumer is adding the first e-mail, `_add_first` waits until it has. So `cancel` sees that e-mail.
    if await _add_first(connection, [request.id]) and sends:
        return EmailId(request.id, 1, "invitation")
    await cancel(connection, {request.id: request})
    if not sends:
        return None
    last = await connection.fetchval("SELECT max(number) FROM email WHERE request_id = $1", request.id)
    another = EmailId(request.id, last + 1, "invitation")
    await add(connection, [another], {request.id: request})
    return another


async def cancel(connection: Connection, requests: Mapping[UUID, LockedRequest]) -> list[EmailId]:
    """Cancel the pending e-mails of these requests. Returns them.

    First e-mails that no consumer has recorded yet are recorded and cancelled. An e-mail that a worker has
    claimed may still be sent, because the worker may have read the row already.
    """
    await _add_first(connection, list(requests))
    rows = await connection.fetch(
        """
        SELECT request_id, number, kind, traceparent
          FROM email
         WHERE request_id = ANY($1)
           AND state = 'pending'
         ORDER BY request_id, number
           FOR UPDATE
        """,
        list(requests),
    )
    ends = [EmailEnd(EmailId(*row[:3]), None, "cancelled", traceparent=row["traceparent"]) for row in rows]
    await announce_ends(connection, ends, requests)
    return [end.id for end in ends]


async def _add_first(connection: Connection, request_ids: Sequence[UUID]) -> bool:
    """Add the missing first e-mails of locked requests. Returns False if none was missing."""
    added = await connection.fetch(
        """
        INSERT INTO email (request_id, number, kind)
        SELECT request_id, 1, 'invitation'
          FROM unnest($1::uuid[]) AS first (request_id)
         ORDER BY request_id -- as a consumer does: otherwise the two could deadlock
        ON CONFLICT (request_id, number) DO NOTHING
        RETURNING true
        """,
        request_ids,
    )
    return bool(added)


async def add(
    connection: Connection, emails: Sequence[EmailId], requests: Mapping[UUID, LockedRequest]
) -> list[EmailId]:
    """Add those of these e-mails whose request is one of *requests*. Returns those added.

    A request gets no e-mail while one of its e-mails is pending, or if the number or a later one is taken.
    """
    wanted = [email for email in emails if email.request_id in requests]
    rows = await connection.fetch(
        """
        INSERT INTO email (request_id, number, kind)
        SELECT request_id, number, kind
          FROM unnest($1::uuid[], $2::integer[], $3::text[]) AS wanted (request_id, number, kind)
         WHERE NOT EXISTS (SELECT
                             FROM email
                            WHERE email.request_id = wanted.request_id
                              AND (state = 'pending' OR email.number >= wanted.number))
        RETURNING request_id, number, kind
        """,
        [email.request_id for email in wanted],
        [email.number for email in wanted],
        [email.kind for email in wanted],
    )
    return [EmailId(*row) for row in rows]
