"""The ledger of e-mails: which are pending, sent or failed, with the replies of the mail server."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import asyncpg
import msgspec

from service.calculation_requests.columns import with_columns
from service.calculation_requests.model import CalculationRequest
from service.postgres.pool import Connection
from worker.batches import RowLocked


class Email(msgspec.Struct, frozen=True):
    """A due e-mail, claimed by this process."""

    request: CalculationRequest
    firm: str  # the registered name of the request's conveyancer
    event_id: str
    created_at: datetime
    attempts: int
    traceparent: str | None


class Intent(msgspec.Struct, frozen=True):
    """An e-mail that is to be sent for an event."""

    event_id: str
    request_id: UUID
    traceparent: str | None = None


async def add(connection: Connection, intents: Sequence[Intent]) -> set[UUID]:
    """Record that e-mails are to be sent. Returns the ids of the requests that exist.

    Repeating an event changes nothing.
    """
    rows = await connection.fetch(
        """
        WITH known AS (
            SELECT intent.*
              FROM unnest($1::text[], $2::uuid[], $3::text[]) AS intent (event_id, request_id, traceparent)
              JOIN calculation_request AS request
                ON request.id = intent.request_id
        ), intended AS (
            INSERT INTO email (event_id, request_id, traceparent)
            SELECT event_id, request_id, traceparent
              FROM known
             -- Or ON CONFLICT would wait for a session that is changing the e-mail. With NOT EXISTS a plan
             -- made while the table is empty reads all of it later: 57 ms with 500,000 e-mails, not 3.
             WHERE event_id <> ALL (ARRAY (SELECT event_id FROM email WHERE event_id = ANY ($1)))
             ORDER BY event_id -- or two processes with the same events could deadlock
            ON CONFLICT (event_id) DO NOTHING
        )
        SELECT request_id
          FROM known
        """,
        [each.event_id for each in intents],
        [each.request_id for each in intents],
        [each.traceparent for each in intents],
    )
    return {row["request_id"] for row in rows}


async def claim(
    connection: Connection, process_id: UUID, *, under_way: Sequence[str], limit: int, seconds: float
) -> list[Email]:
    """Claim at most *limit* due e-mails, for *seconds* of the database's clock unless renewed.

    Those *under_way* in this process are excluded: their claims may have expired while Postgres was
    unreachable. Taking over an e-mail whose claim another process let expire charges an attempt. After a
    crash, failover or restart of Postgres, expired claims are left alone for another *seconds*: their process
    may be alive, with the mail server's reply in hand.
    """
    rows = await connection.fetch(_CLAIM, process_id, limit, seconds, under_way)
    return [Email(CalculationRequest(*row[:-5]), *row[-5:]) for row in rows]


# Reads the requests one by one, by their primary key: a generic plan expects many e-mails of any limit.
_CLAIM = with_columns(
    """
    WITH recovered AS (
        INSERT INTO postgres_up (since)
        SELECT now()
         WHERE NOT EXISTS (SELECT FROM postgres_up)
        ON CONFLICT DO NOTHING
    ), claimed AS (
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
    )
    SELECT {request_columns}, firm.name, claimed.event_id, claimed.created_at, claimed.attempts,
           claimed.traceparent
      FROM claimed
     CROSS JOIN LATERAL (SELECT * FROM calculation_request WHERE id = claimed.request_id LIMIT 1) AS request
     CROSS JOIN LATERAL (SELECT name FROM conveyancer WHERE id = request.conveyancer_id LIMIT 1) AS firm
    """
)


async def renew(
    connection: Connection, process_id: UUID, event_ids: Sequence[str], *, seconds: float
) -> set[str]:
    """Extend the claims of a process on e-mails that it is sending. Returns those that it still held."""
    rows = await connection.fetch(
        """
        UPDATE email
           SET next_attempt_at = now() + make_interval(secs => $3)
         WHERE event_id IN (SELECT event_id
                              FROM email
                             WHERE event_id = ANY($2)
                               AND claimed_by = $1
                               AND state = 'pending'
                               FOR UPDATE SKIP LOCKED) -- those being settled: waiting for them could deadlock
        RETURNING event_id
        """,
        process_id,
        event_ids,
        seconds,
    )
    return {row["event_id"] for row in rows}


async def put_off(
    connection: Connection, process_id: UUID, event_id: str, *, server_reply: str | None, seconds: float
) -> None:
    """Give a claim up; the e-mail is due again after *seconds*. With a *server_reply*, charge an attempt.

    Changes nothing if another process has taken the e-mail over. Raises RowLocked.
    """
    try:
        await connection.execute(
            """
            UPDATE email
               SET attempts = attempts + ($2::text IS NOT NULL)::integer,
                   server_reply = coalesce($2, server_reply),
                   claimed_by = NULL,
                   next_attempt_at = now() + make_interval(secs => $3)
             WHERE event_id = (SELECT event_id
                                 FROM email
                                WHERE event_id = $1
                                  AND claimed_by = $4
                                  AND state = 'pending'
                                  FOR UPDATE NOWAIT)
            """,
            event_id,
            server_reply,
            seconds,
            process_id,
        )
    except asyncpg.LockNotAvailableError:
        raise RowLocked from None


async def release(connection: Connection, process_id: UUID, event_ids: Sequence[str]) -> None:
    """Give claims up without charging an attempt: the mail server was not given these e-mails."""
    await connection.execute(
        """
        UPDATE email
           SET claimed_by = NULL,
               next_attempt_at = now()
         WHERE event_id IN (SELECT event_id
                              FROM email
                             WHERE event_id = ANY($2)
                               AND claimed_by = $1
                               AND state = 'pending'
                               FOR UPDATE SKIP LOCKED)
        """,
        process_id,
        event_ids,
    )
