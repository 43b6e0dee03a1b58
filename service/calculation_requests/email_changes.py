"""Changes to the e-mails of locked requests: how they end (sent, failed or cancelled), and adding new ones.

The worker ends e-mails, as sent or failed. Firms and operators add e-mails, which may replace pending ones.
Operators, withdrawals and erasures cancel e-mails.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple
from uuid import UUID

import msgspec

from service.calculation_requests.changing import LockedRequest
from service.calculation_requests.model import RequestWithdrawn, TooManyEmails
from service.calculation_requests.request_secrets import SecretKeyRing
from service.identifiers import uuid_of
from service.outbox.events import Reason, RequestCorrected, RequestEmailFailed, RequestEmailSent
from service.postgres.pool import Connection

_MOST_REQUESTED = 20  # e-mails that a firm may ask for, of one request

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


class Cause(NamedTuple):
    """What an e-mail was added for: the call of a firm, or neither if an operator's command adds it."""

    client_id: str | None = None
    traceparent: str | None = None


_OPERATOR = Cause()


async def send_as_requested(
    connection: Connection,
    request: LockedRequest,
    *,
    keys: SecretKeyRing,
    cause: Cause,
    address: str | None,
    new_link: bool,
) -> None:
    """Send a request's e-mail again, as its firm asks, with a *new_link* if the address is another one.

    If neither changes, and an e-mail is pending, none is added. So a repeated call is harmless. Raises
    RequestWithdrawn and TooManyEmails.
    """
    if request.withdrawn_at is not None:
        raise RequestWithdrawn
    address = None if address == request.customer_email else address
    is_same = address is None and not new_link
    ((is_pending, are_enough),) = await connection.fetch(_READ_REQUESTED, request.id, _MOST_REQUESTED)
    if is_same and is_pending:
        return
    if are_enough:
        raise TooManyEmails
    if is_same:
        await _add_another(connection, request, cause)
    else:
        await correct(connection, request, keys, address=address, cause=cause)


# The first e-mail of a request that has none is on its way.
_READ_REQUESTED = """
    SELECT coalesce(bool_or(state = 'pending'), true),
           count(requested_by) >= $2 OR max(created_at) FILTER (WHERE requested_by IS NOT NULL)
                                        > now() - interval '1 min'
      FROM email
     WHERE request_id = $1
"""


async def correct(
    connection: Connection,
    request: LockedRequest,
    keys: SecretKeyRing,
    *,
    address: str | None,
    cause: Cause = _OPERATOR,
    sends: bool = True,
) -> EmailId | None:
    """Give a request a new secret, and its customer another address unless *address* is None.

    Pending e-mails are cancelled, because a worker may have claimed them with the old link. Returns the
    e-mail with the new link. Without *sends*, none is sent, and None is returned. Raises RequestWithdrawn.
    """
    if request.withdrawn_at is not None:
        raise RequestWithdrawn
    request.customer_email = address or request.customer_email
    request.secret_salt, request.secret_key_id = secrets.token_bytes(16), keys.current_id
    changed = "link" if address is None else "customer_email"
    request.announce(RequestCorrected, traceparent=cause.traceparent, changed=changed)
    # If a consumer is adding the first e-mail, `_add_first` waits until it has. So `cancel` sees that e-mail.
    if await _add_first(connection, [request.id], cause) and sends:
        return EmailId(request.id, 1, "invitation")
    await cancel(connection, {request.id: request})
    return await _add_another(connection, request, cause) if sends else None


async def _add_another(connection: Connection, request: LockedRequest, cause: Cause) -> EmailId:
    last = await connection.fetchval("SELECT max(number) FROM email WHERE request_id = $1", request.id)
    another = EmailId(request.id, last + 1, "invitation")
    await add(connection, [another], {request.id: request}, cause)
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


async def _add_first(connection: Connection, request_ids: Sequence[UUID], cause: Cause = _OPERATOR) -> bool:
    """Add the missing first e-mails of locked requests. Returns False if none was missing."""
    added = await connection.fetch(
        """
        INSERT INTO email (request_id, number, kind, requested_by, traceparent)
        SELECT request_id, 1, 'invitation', $2, $3
          FROM unnest($1::uuid[]) AS first (request_id)
         ORDER BY request_id -- as a consumer does: otherwise the two could deadlock
        ON CONFLICT (request_id, number) DO NOTHING
        RETURNING true
        """,
        request_ids,
        *cause,
    )
    return bool(added)


async def add(
    connection: Connection,
    emails: Sequence[EmailId],
    requests: Mapping[UUID, LockedRequest],
    cause: Cause = _OPERATOR,
) -> list[EmailId]:
    """Add those of these e-mails whose request is one of *requests*. Returns those added.

    A request gets none if it was withdrawn, has a pending e-mail, or the number or a later one is taken.
    """
    open_ids = {each.id for each in requests.values() if each.withdrawn_at is None}
    wanted = [email for email in emails if email.request_id in open_ids]
    rows = await connection.fetch(
        """
        INSERT INTO email (request_id, number, kind, requested_by, traceparent)
        SELECT request_id, number, kind, $4, $5
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
        *cause,
    )
    return [EmailId(*row) for row in rows]
