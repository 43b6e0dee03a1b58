"""The e-mails of requests that both processes and operators change: how they end, and further ones.

The first e-mail of a request is brought about by its request.created. Its key is the id of that event. The
keys of the others are that of the first one and a number, from 2 on. The Message-ID is made from the key.
"""

from collections.abc import Mapping, Sequence
from uuid import UUID

import msgspec

from service.calculation_requests import reading, storing
from service.calculation_requests.event_history import end_event
from service.calculation_requests.storing import Announcement
from service.outbox.events import Reason
from service.postgres.pool import Connection


class EmailEnd(msgspec.Struct, frozen=True):
    """An e-mail that was sent, or has failed for a reason."""

    key: str
    request_id: UUID
    reply: str | None  # of the mail server
    reason: Reason | None = None  # None: sent
    smtp_code: int = 0
    traceparent: str | None = None


async def settle(connection: Connection, ends: Sequence[EmailEnd]) -> set[str]:
    """Record the ends of e-mails and announce them, in the caller's transaction. Returns their keys.

    Those that had ended before are left alone. The claims are not checked: a mail server's reply holds even
    if another process has taken the e-mail over.
    """
    requests = await reading.lock_all(connection, {end.request_id for end in ends})
    pending = await _lock_pending(connection, [end.key for end in ends])
    sequences = {request_id: request.sequence for request_id, request in requests.items()}
    settled_at = storing.now()
    settled = [end for end in ends if end.key in pending]
    announcements = []
    for end in settled:
        sequences[end.request_id] += 1
        event = end_event(
            requests[end.request_id],
            sequence=sequences[end.request_id],
            reason=end.reason,
            smtp_code=end.smtp_code,
        )
        announcements.append(Announcement(end.request_id, event, settled_at, end.traceparent))
    if settled:
        await connection.execute(
            _SETTLE,
            [end.key for end in settled],
            [end.reply for end in settled],
            [announcement.event.sequence for announcement in announcements],
            [None if end.reason is None else end.smtp_code for end in settled],
            [end.reason for end in settled],
            settled_at,
        )
        await storing.announce(connection, announcements)
    return pending


# An operator who cancels an e-mail makes no attempt at it.
_SETTLE = """
    UPDATE email
       SET state = CASE WHEN settled.reason IS NULL THEN 'sent' ELSE 'failed' END,
           server_reply = coalesce(settled.server_reply, email.server_reply),
           attempts = attempts + (settled.reason IS DISTINCT FROM 'cancelled')::integer,
           claimed_by = NULL,
           settled_at = $6,
           event_sequence = settled.sequence,
           smtp_code = settled.smtp_code,
           reason = settled.reason
      FROM unnest($1::text[], $2::text[], $3::integer[], $4::integer[], $5::text[])
           AS settled (event_id, server_reply, sequence, smtp_code, reason)
     WHERE email.event_id = settled.event_id
"""


async def _lock_pending(connection: Connection, keys: Sequence[str]) -> set[str]:
    """Return those of these e-mails that have not ended, and lock their rows until the transaction ends."""
    rows = await connection.fetch(
        """
        SELECT event_id
          FROM email
         WHERE event_id = ANY($1)
           AND state = 'pending'
         ORDER BY event_id
           FOR UPDATE
        """,
        keys,
    )
    return {row["event_id"] for row in rows}


async def cancel(connection: Connection, request_ids: Sequence[UUID]) -> set[str]:
    """End the pending e-mails of these requests unsent, in the caller's transaction. Returns their keys.

    One whose content is being given to the mail server may arrive all the same.
    """
    rows = await connection.fetch(
        """
        SELECT event_id, request_id, traceparent
          FROM email
         WHERE request_id = ANY($1)
           AND state = 'pending'
        """,
        request_ids,
    )
    ends = [
        EmailEnd(row["event_id"], row["request_id"], None, "cancelled", traceparent=row["traceparent"])
        for row in rows
    ]
    return await settle(connection, ends)


async def cancel_first(connection: Connection, keys: Mapping[str, UUID]) -> None:
    """End the first e-mails of requests, whose request.created is gone, in the caller's transaction.

    *keys* are those of the e-mails, with their requests. An e-mail that has begun is left alone.
    """
    rows = await connection.fetch(
        """
        INSERT INTO email (event_id, request_id)
        SELECT first.event_id, first.request_id
          FROM unnest($1::text[], $2::uuid[]) AS first (event_id, request_id)
          JOIN calculation_request AS request
            ON request.id = first.request_id
         ORDER BY first.event_id
        ON CONFLICT (event_id) DO NOTHING
        RETURNING event_id
        """,
        list(keys),
        list(keys.values()),
    )
    begun = [row["event_id"] for row in rows]
    await settle(connection, [EmailEnd(key, keys[key], None, "cancelled") for key in begun])


async def add_again(connection: Connection, request_ids: Sequence[UUID]) -> dict[UUID, str]:
    """Record that another e-mail is to be sent for each of these requests, in the caller's transaction.

    Returns their keys by request. A request with a pending e-mail gets none, nor does one that has had none.
    """
    rows = await connection.fetch(
        """
        INSERT INTO email (event_id, request_id)
        SELECT min(event_id) || '.' || (count(*) + 1), request_id
          FROM email
         WHERE request_id = ANY($1)
         GROUP BY request_id
        HAVING bool_and(state <> 'pending')
         ORDER BY request_id -- or two operators with the same requests could deadlock
        ON CONFLICT (event_id) DO NOTHING
        RETURNING request_id, event_id
        """,
        request_ids,
    )
    return {row["request_id"]: row["event_id"] for row in rows}
