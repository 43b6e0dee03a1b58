"""The ledger of e-mails, a row for each, with the mail server's last reply.

An e-mail is pending until it ends: until it is sent or has failed. A process claims an e-mail before it makes
an attempt to send it, so that no other process does. Each claim ends with one of these outcomes:

- sent: the mail server accepted the content.
- failed: the mail server refused the e-mail for good, it was given up after days, or it cannot be composed.
  (An e-mail that is cancelled has failed, too, without an attempt: email_changes.py.)
- postponed: the mail server refused the e-mail for now, or did not reply. The e-mail is due again later.
- internal_error: this service could not compose or send the e-mail. The e-mail is due again later.
- given_back: the mail server accepts no e-mail now, or the process may not send the e-mail any more. The
  e-mail is due again at once, and the attempt is not counted.
"""

import time
from collections.abc import Collection, Sequence
from typing import Literal, TypeAlias
from uuid import UUID

import msgspec

from service.calculation_requests.changing import change_all
from service.calculation_requests.email_changes import EmailEnd, EmailId, announce_ends
from service.calculation_requests.model import REQUEST_COLUMNS, CalculationRequest
from service.outbox.events import Reason
from service.postgres.pool import Connection
from worker import metrics
from worker.batches import Failures, TryAgain


class Email(msgspec.Struct, frozen=True):
    """A due e-mail, claimed by this process."""

    id: EmailId
    request: CalculationRequest
    firm: str  # the registered name of the request's conveyancer
    attempts: int
    traceparent: str | None
    # By time.monotonic, because only Postgres's clock can be compared with stored times: when the e-mail was
    # added, and when its request was created or, for a later e-mail of the request, when that was added.
    added: float
    caused: float

    def ended(self, reply: str, reason: Reason | None = None, smtp_code: int = 0) -> EmailEnd:
        """Return the outcome `sent` or, with a *reason*, `failed`."""
        return EmailEnd(self.id, reply, reason, smtp_code, self.traceparent)


class Release(msgspec.Struct, frozen=True):
    """An outcome after which the e-mail is still pending, and due again after *seconds*."""

    id: EmailId
    label: Literal["postponed", "internal_error", "given_back"]
    seconds: float = 0.0
    reply: str | None = None  # the mail server's, or our own text
    smtp_code: int = 0


Outcome: TypeAlias = EmailEnd | Release


async def claim(
    connection: Connection, process_id: UUID, *, under_way: Collection[EmailId], limit: int, seconds: float
) -> tuple[list[Email], int]:
    """Claim at most *limit* due e-mails. A claim lasts *seconds* by the database's clock, unless renewed.

    Returns the claimed e-mails, and how many others were due but could not be claimed. Those are due later.

    E-mails *under_way* in this process are excluded: their claims may have expired in an outage of Postgres.
    E-mails whose claim has expired are left alone until Postgres has been up for *seconds* after a crash,
    failover or restart. Their process could not renew the claims, and may still record a reply.
    """
    excluded = [each.request_id for each in under_way], [each.number for each in under_way]
    rows = await connection.fetch(_CLAIM, process_id, limit, seconds, *excluded, time.monotonic())
    # Each row has whether the e-mail was claimed, what identifies it, its five other fields, and its request.
    emails = [Email(EmailId(*row[1:4]), CalculationRequest(*row[9:]), *row[4:9]) for row in rows if row[0]]
    return emails, len(rows) - len(emails)


# next_attempt_at is when an e-mail is due or, if it is claimed, when its claim expires.
#
# An e-mail is not claimed if its end could not be recorded: because its request was deleted by hand, or is
# locked. It is due again later. Otherwise it would always be due before others. A new e-mail is claimed even
# if its request is locked, because then a consumer may have locked it for a few milliseconds.
#
# A crash of Postgres empties postgres_up, which is unlogged. The first claim afterwards adds the row `since`,
# but does not see it yet: a statement does not see its own INSERT. So it takes over no claim.
#
# The request's time has no fractions of seconds, and its e-mail is nearly always added at once.
#
# With LATERAL and LIMIT, Postgres reads each request by its primary key. For a join, a generic plan, which
# expects many e-mails, might read the whole table.
_CLAIM = f"""
    WITH recovered AS (
        INSERT INTO postgres_up (since)
        SELECT now()
         WHERE NOT EXISTS (SELECT FROM postgres_up)
        ON CONFLICT DO NOTHING
    ), due AS (
        SELECT request_id, number, created_at > now() - interval '1 s' AS is_new
          FROM email
         WHERE state = 'pending'
           AND next_attempt_at <= now()
           AND (request_id, number) NOT IN (SELECT * FROM unnest($4::uuid[], $5::integer[]))
           AND (claimed_by IS NULL
                OR (SELECT greatest(since, pg_postmaster_start_time())
                      FROM postgres_up) <= now() - make_interval(secs => $3))
         ORDER BY next_attempt_at
         LIMIT $2
           FOR UPDATE SKIP LOCKED
    )
    UPDATE email
       SET claimed_by = CASE WHEN request.id IS NOT NULL AND (is_new OR is_free) THEN $1::uuid END,
           next_attempt_at = now() + CASE WHEN request.id IS NULL THEN interval '1 hour' -- It may return.
                                          WHEN is_new OR is_free THEN make_interval(secs => $3)
                                          ELSE interval '1 s' END
      FROM due
      LEFT JOIN LATERAL (SELECT * FROM calculation_request WHERE id = due.request_id LIMIT 1) AS request
        ON true
      LEFT JOIN LATERAL (SELECT true AS is_free
                           FROM calculation_request
                          WHERE id = due.request_id
                            AND NOT is_new
                          LIMIT 1
                            FOR NO KEY UPDATE SKIP LOCKED) AS lock ON true
     WHERE (email.request_id, email.number) = (due.request_id, due.number)
       AND email.request_id = ANY (ARRAY (SELECT request_id FROM due)) -- so a generic plan uses the index
    RETURNING claimed_by IS NOT NULL, email.request_id, email.number, kind,
              (SELECT name FROM conveyancer WHERE id = request.conveyancer_id), attempts, traceparent,
              $6 - extract(epoch FROM now() - email.created_at)::float8,
              $6 - extract(epoch FROM now() - least(
                   email.created_at,
                   CASE WHEN email.number = 1 THEN request.created_at + interval '1 s' END))::float8,
              {REQUEST_COLUMNS}
"""  # noqa: S608 - constants only


async def renew(
    connection: Connection, process_id: UUID, emails: Sequence[EmailId], *, seconds: float
) -> set[EmailId]:
    """Renew a process's claims on the e-mails of the same requests as *emails*. Returns those renewed."""
    rows = await connection.fetch(
        """
        UPDATE email
           SET next_attempt_at = now() + make_interval(secs => $3)
         WHERE request_id = ANY($2)
           AND (request_id, number) IN (SELECT request_id, number
                                          FROM email
                                         WHERE request_id = ANY($2)
                                           AND claimed_by = $1
                                           AND state = 'pending'
                                           FOR UPDATE SKIP LOCKED) -- waiting for an end could deadlock
        RETURNING request_id, number, kind
        """,
        process_id,
        [each.request_id for each in emails],
        seconds,
    )
    return {EmailId(*row) for row in rows}


async def record_ends(connection: Connection, ends: Sequence[EmailEnd]) -> Failures:
    """Record and announce the ends of e-mails that are pending, in the caller's transaction.

    Returns TryAgain for each e-mail whose row, or whose request's row, is locked, and None for the others.
    """
    async with change_all(connection, {end.id.request_id for end in ends}, waits=False) as requests:
        lock = f"{_FIND_PENDING} ORDER BY request_id, number FOR UPDATE SKIP LOCKED"
        pending = {EmailId(*row) for row in await connection.fetch(lock, list(requests))}
        await announce_ends(connection, [end for end in ends if end.id in pending], requests)
    others = [end.id.request_id for end in ends if end.id not in pending]
    locked = {EmailId(*row) for row in await connection.fetch(_FIND_PENDING, others)} if others else set()
    return [TryAgain("the row is locked") if end.id in locked else None for end in ends]


# Without the e-mails whose request was deleted by hand: their ends cannot be recorded, and the claims expire.
_FIND_PENDING = """
    SELECT request_id, number, kind
      FROM email
     WHERE request_id = ANY($1)
       AND state = 'pending'
       AND (SELECT true FROM calculation_request WHERE id = email.request_id LIMIT 1)
"""


async def release(connection: Connection, process_id: UUID, outcome: Release) -> None:
    """Record an outcome, and release the process's claim. If the row is locked, the claim expires instead."""
    await connection.execute(
        """
        UPDATE email
           SET attempts = attempts + $6::boolean::integer,
               server_reply = coalesce($5, server_reply),
               claimed_by = NULL,
               next_attempt_at = now() + make_interval(secs => $4)
         WHERE request_id = $2
           AND number = (SELECT number
                           FROM email
                          WHERE request_id = $2
                            AND number = $3
                            AND claimed_by = $1
                            AND state = 'pending'
                            FOR UPDATE SKIP LOCKED)
        """,
        process_id,
        outcome.id.request_id,
        outcome.id.number,
        outcome.seconds,
        outcome.reply,
        outcome.label != "given_back",
    )


async def read_gauges(connection: Connection) -> None:
    """Set the gauges of the pending e-mails, from the COUNT_LIMIT e-mails that are due first."""
    (row,) = await connection.fetch(
        """
        SELECT count(*) AS number,
               greatest(0, extract(epoch FROM now() - min(created_at)))::float8 AS oldest_seconds
          FROM (SELECT created_at
                  FROM email
                 WHERE state = 'pending'
                 ORDER BY next_attempt_at
                 LIMIT $1) AS due_first
        """,
        metrics.COUNT_LIMIT,
    )
    metrics.emails_pending.set(row["number"])
    metrics.emails_oldest_age.set(row["oldest_seconds"])
