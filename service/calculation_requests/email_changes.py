"""Changes to the e-mails of locked requests: how they end (sent, failed, cancelled), and adding new ones."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple
from uuid import UUID

import msgspec

from service.calculation_requests.changing import LockedRequest
from service.calculation_requests.model import AlreadyWithdrawn, TooManyEmails
from service.identifiers import uuid_of
from service.outbox.events import Reason, RequestCorrected, RequestEmailFailed, RequestEmailSent
from service.postgres.connections import REPLICATE
from service.postgres.pool import Connection

_MOST_REQUESTED = 20  # e-mails of one request, through the API

Kind = Literal["invitation"]  # worker/mail/message.py says what each kind is.


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

    Their rows, and their *requests*, must be locked. A reply counts even if another process has the claim.
    """
    rows = []
    for end in ends:
        request, email = requests[end.id.request_id], {"email": end.id.number, "kind": end.id.kind}
        if end.reason is None:
            request.announce(RequestEmailSent, traceparent=end.traceparent, **email)
        else:
            facts = {"reason": end.reason, "smtp_code": end.smtp_code}
            request.announce(RequestEmailFailed, traceparent=end.traceparent, **email, **facts)
        code = None if end.reason is None else end.smtp_code
        rows.append((request.id, end.id.number, end.reply, code, end.reason, request.locked_at))
    if rows:
        await connection.executemany(_END, rows)


# A cancellation is no attempt, and a bounce follows an attempt that was counted.
_END = """
    UPDATE email
       SET state = CASE WHEN $5::text IS NULL THEN 'sent' ELSE 'failed' END,
           server_reply = coalesce($3, server_reply),
           attempts = attempts + (coalesce($5, '') NOT IN ('cancelled', 'bounced'))::integer,
           claimed_by = NULL,
           settled_at = $6,
           smtp_code = $4,
           reason = $5
     WHERE request_id = $1
       AND number = $2
"""


async def send_as_requested(
    connection: Connection, request: LockedRequest, *, key_id: str, address: str | None, new_link: bool
) -> None:
    """Send a request's e-mail again, as its firm asks. With another *address*, the link is replaced, too.

    If nothing is replaced, and an e-mail is pending, none is added. Raises AlreadyWithdrawn, TooManyEmails.
    """
    if request.withdrawn_at is not None:
        raise AlreadyWithdrawn
    address = None if address == request.customer_email else address
    is_same = address is None and not new_link
    ((is_pending, is_limit_reached),) = await connection.fetch(_READ_REQUESTED, request.id, _MOST_REQUESTED)
    if is_same and is_pending:
        return
    if is_limit_reached:
        raise TooManyEmails
    if is_same:
        await _add_another(connection, request)
    else:
        await correct(connection, request, key_id=key_id, address=address)


# The first e-mail of a request that has none is on its way.
_READ_REQUESTED = """
    SELECT coalesce(bool_or(state = 'pending'), true),
           count(requested_by) >= $2 OR max(created_at) FILTER (WHERE requested_by IS NOT NULL)
                                        > now() - interval '1 min'
      FROM email
     WHERE request_id = $1
"""


async def correct(
    connection: Connection, request: LockedRequest, *, key_id: str, address: str | None, sends: bool = True
) -> EmailId | None:
    """Give a request a new secret, of the key *key_id*, and another address unless *address* is None.

    Pending e-mails are cancelled, because a worker may have claimed them with the old link. Returns the
    e-mail with the new link. Without *sends*, none is sent, and None is returned. Raises AlreadyWithdrawn.
    """
    if request.withdrawn_at is not None:
        raise AlreadyWithdrawn
    request.customer_email = address or request.customer_email
    request.secret_salt, request.secret_key_id = secrets.token_bytes(16), key_id
    changed = "link" if address is None else "customer_email"
    request.announce(RequestCorrected, changed=changed)
    await cancel(connection, {request.id: request})
    return await _add_another(connection, request) if sends else None


async def _add_another(connection: Connection, request: LockedRequest) -> EmailId:
    last = await connection.fetchval("SELECT max(number) FROM email WHERE request_id = $1", request.id)
    another = EmailId(request.id, last + 1, "invitation")
    (added,) = await add(connection, [another], {request.id: request})
    return added


async def cancel(connection: Connection, requests: Mapping[UUID, LockedRequest]) -> list[EmailId]:
    """Cancel the pending e-mails of these requests, also those that no consumer has recorded. Returns them.

    A claimed e-mail may still be sent, because the worker may have read the row already.
    """
    # If a consumer is adding a first e-mail, this waits until it has. So the next statement sees that e-mail.
    await add_first(connection, [FirstEmail(request_id) for request_id in requests])
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


class FirstEmail(NamedTuple):
    """The first e-mail of a request, which request.created causes."""

    request_id: UUID
    traceparent: str | None = None


async def add_first(connection: Connection, emails: Sequence[FirstEmail]) -> set[UUID]:
    """Add first e-mails unless they exist. Returns which requests exist. The commit waits for a standby."""
    request_ids = await connection.fetchval(
        f"""
        WITH known AS (
            SELECT first.*
              FROM unnest($1::uuid[], $2::text[]) AS first (request_id, traceparent)
              JOIN calculation_request AS request
                ON request.id = first.request_id
        ), added AS (
            INSERT INTO email (request_id, number, kind, traceparent)
            SELECT request_id, 1, 'invitation', traceparent
              FROM known
             -- Without this condition, ON CONFLICT would wait for a session that is changing the e-mail. As
             -- NOT EXISTS, planned while the table was empty, it took 57 ms with 500,000 e-mails, not 3 ms.
             WHERE request_id <> ALL (ARRAY (SELECT request_id FROM email WHERE request_id = ANY ($1)))
             ORDER BY request_id -- otherwise two processes with the same requests could deadlock
            ON CONFLICT (request_id, number) DO NOTHING
        )
        SELECT ARRAY (SELECT request_id FROM known), {REPLICATE}
        """,  # noqa: S608 - constants only
        [email.request_id for email in emails],
        [email.traceparent for email in emails],
    )
    return set(request_ids)


async def add(
    connection: Connection, emails: Sequence[EmailId], requests: Mapping[UUID, LockedRequest]
) -> list[EmailId]:
    """Add those of these e-mails whose request is one of *requests*. Returns those added.

    A request gets none if it was withdrawn or has a pending e-mail, or if this or a later number is taken.
    """
    wanted = [(email, requests.get(email.request_id)) for email in emails]
    rows = await connection.fetchmany(
        """
        INSERT INTO email (request_id, number, kind, requested_by, traceparent)
        SELECT $1, $2, $3, $4, $5
         WHERE NOT EXISTS (SELECT
                             FROM email
                            WHERE request_id = $1
                              AND (state = 'pending' OR number >= $2))
        RETURNING request_id, number, kind
        """,
        [
            (*email, request.client_id, request.traceparent)
            for email, request in wanted
            if request is not None and request.withdrawn_at is None
        ],
    )
    return [EmailId(*row) for row in rows]
