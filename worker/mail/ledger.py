"""The ledger of e-mails: which are pending, sent or failed, with the replies of the mail server."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from service.outbox.events import RequestEmailFailed, RequestEmailSent
from service.postgres.pool import Connection


class Email(msgspec.Struct, frozen=True):
    """A due e-mail, claimed by this process."""

    event_id: str
    request_id: UUID
    created_at: datetime
    attempts: int
    traceparent: str | None = None


async def add(
    connection: Connection, event_id: str, request_id: UUID, *, traceparent: str | None = None
) -> bool:
    """Record that an e-mail is to be sent. False when there is no such request.

    Repeating an event changes nothing.
    """
    known: bool = await connection.fetchval(
        """
        WITH request AS (
            SELECT id
              FROM calculation_request
             WHERE id = $2
        ), intended AS (
            INSERT INTO email (event_id, request_id, traceparent)
            SELECT $1, id, $3
              FROM request
            ON CONFLICT (event_id) DO NOTHING
        )
        SELECT EXISTS (SELECT FROM request)
        """,
        event_id,
        request_id,
        traceparent,
    )
    return known


async def claim(
    connection: Connection, process_id: UUID, *, under_way: Sequence[str], limit: int, seconds: float
) -> list[Email]:
    """Claim at most *limit* due e-mails, for *seconds* of the database's clock unless renewed.

    Those *under_way* in this process are excluded: their claims may have expired while Postgres was
    unreachable. Taking over an e-mail whose claim another process let expire charges an attempt. After a
    crash, failover or restart of Postgres, expired claims are left alone for another *seconds*: their process
    may be alive, with the mail server's reply in hand.
    """
    rows = await connection.fetch(
        """
        WITH recovered AS (
            INSERT INTO postgres_up (since)
            SELECT now()
             WHERE NOT EXISTS (SELECT FROM postgres_up)
            ON CONFLICT DO NOTHING
        )
        UPDATE email
           SET attempts = attempts + (claimed_by IS NOT NULL)::integer,
               claimed_by = $1,
               next_attempt_at = now() + make_interval(secs => $3)
         WHERE event_id IN (SELECT event_id
                              FROM email
                             WHERE state = 'pending'
                               AND next_attempt_at <= now()
                               AND event_id <> ALL($4)
                               AND (claimed_by IS NULL
                                    OR (SELECT greatest(since, pg_postmaster_start_time())
                                          FROM postgres_up) <= now() - make_interval(secs => $3))
                             ORDER BY next_attempt_at
                             LIMIT $2
                               FOR UPDATE SKIP LOCKED)
        RETURNING event_id, request_id, created_at, attempts, traceparent
        """,
        process_id,
        limit,
        seconds,
        under_way,
    )
    return [Email(**row) for row in rows]


async def renew(
    connection: Connection, process_id: UUID, event_ids: Sequence[str], *, seconds: float
) -> set[str]:
    """Extend the claims of a process on e-mails that it is sending. Returns those that it still held."""
    rows = await connection.fetch(
        """
        UPDATE email
           SET next_attempt_at = now() + make_interval(secs => $3)
         WHERE event_id = ANY($2)
           AND claimed_by = $1
           AND state = 'pending'
        RETURNING event_id
        """,
        process_id,
        event_ids,
        seconds,
    )
    return {row["event_id"] for row in rows}


async def settle(
    connection: Connection,
    event_id: str,
    event: RequestEmailSent | RequestEmailFailed,
    *,
    server_reply: str,
    settled_at: datetime,
) -> bool:
    """Record that an e-mail was sent or has failed, as its event says. False when that was recorded before.

    The claim is not checked: the mail server's reply holds even if another process has taken the e-mail over.
    """
    failure = event if isinstance(event, RequestEmailFailed) else None
    settled = await connection.fetchval(
        """
        UPDATE email
           SET state = $2,
               server_reply = $3,
               attempts = attempts + 1,
               claimed_by = NULL,
               settled_at = $4,
               event_sequence = $5,
               smtp_code = $6,
               reason = $7
         WHERE event_id = $1
           AND state = 'pending'
        RETURNING event_id
        """,
        event_id,
        "failed" if failure else "sent",
        server_reply,
        settled_at,
        event.sequence,
        failure and failure.smtp_code,
        failure and failure.reason,
    )
    return settled is not None


async def postpone(
    connection: Connection, process_id: UUID, event_id: str, *, server_reply: str, seconds: float
) -> None:
    """Charge one attempt; the e-mail is due again after *seconds*.

    Changes nothing if another process has taken the e-mail over.
    """
    await connection.execute(
        """
        UPDATE email
           SET attempts = attempts + 1,
               server_reply = $2,
               claimed_by = NULL,
               next_attempt_at = now() + make_interval(secs => $3)
         WHERE event_id = $1
           AND claimed_by = $4
           AND state = 'pending'
        """,
        event_id,
        server_reply,
        seconds,
        process_id,
    )


async def release(connection: Connection, process_id: UUID, event_ids: Sequence[str]) -> None:
    """Give claims up without charging an attempt: the mail server was not given these e-mails."""
    await connection.execute(
        """
        UPDATE email
           SET claimed_by = NULL,
               next_attempt_at = now()
         WHERE event_id = ANY($2)
           AND claimed_by = $1
           AND state = 'pending'
        """,
        process_id,
        event_ids,
    )
