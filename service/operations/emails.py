"""The e-mails of requests that both processes and operators change: how they end, and further ones.

The first e-mail of a request is brought about by its request.created. Its key is the id of that event. The
keys of the others are that of the first one and a number, from 2 on. The Message-ID is made from the key.

A transaction locks the requests first and then their e-mails, so that no two deadlock.
"""

from collections.abc import Mapping, Sequence
from typing import Literal
from uuid import UUID

import msgspec

from service.calculation_requests import reading, storing
from service.calculation_requests.event_history import end_event
from service.calculation_requests.model import AnnouncedRequest
from service.calculation_requests.storing import Announcement
from service.identifiers import uuid_of
from service.outbox import events
from service.outbox.events import Reason, RequestCreated
from service.postgres.pool import Connection


class EmailEnd(msgspec.Struct, frozen=True):
    """An e-mail that was sent, or has failed for a reason."""

    key: str
    request_id: UUID
    reply: str | None  # of the mail server
    reason: Reason | None = None  # None: sent
    smtp_code: int = 0
    traceparent: str | None = None

    @property
    def label(self) -> Literal["sent", "failed"]:
        """The state of the e-mail from then on."""
        return "sent" if self.reason is None else "failed"


async def record_ends(
    connection: Connection, settled: Sequence[EmailEnd], requests: Mapping[UUID, AnnouncedRequest]
) -> None:
    """Record the ends of pending e-mails and announce them. Their rows and those of *requests* are locked.

    The claims are not checked: a mail server's reply holds even if another process has taken the e-mail over.
    """
    if not settled:
        return
    sequences = {request_id: request.sequence for request_id, request in requests.items()}
    settled_at = storing.now()
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


async def replace(connection: Connection, request_id: UUID, *, sends: bool) -> str | None:
    """End the pending e-mails of a locked request unsent, and record that another is to be sent.

    Returns its key. It is the first e-mail if request.created has not been consumed: the consumer then adds
    none. Without *sends* no e-mail is sent, not even that one.
    """
    # Waits for a consumer that is adding this e-mail, so that it is seen below.
    if await _add_first(connection, [request_id]) and sends:
        return first_key(request_id)
    await cancel(connection, [request_id])
    if not sends:
        return None
    keys = await connection.fetch("SELECT event_id FROM email WHERE request_id = $1", request_id)
    another = await add_again(connection, {row["event_id"]: request_id for row in keys})
    return another[request_id]


async def cancel(connection: Connection, request_ids: Sequence[UUID]) -> dict[UUID, str]:
    """End the pending e-mails of these requests unsent, in the caller's transaction, also those not begun.

    Returns their keys, by request. An e-mail that a worker has claimed may be sent all the same: the
    worker may have read its row already.
    """
    requests = await reading.lock(connection, request_ids)
    await _add_first(connection, list(requests))
    rows = await connection.fetch(
        """
        SELECT event_id, request_id, traceparent
          FROM email
         WHERE request_id = ANY($1)
           AND state = 'pending'
         ORDER BY event_id
           FOR UPDATE
        """,
        list(requests),
    )
    ends = [
        EmailEnd(key, request_id, None, "cancelled", 0, traceparent) for key, request_id, traceparent in rows
    ]
    await record_ends(connection, ends, requests)
    return {end.request_id: end.key for end in ends}


def first_key(request_id: UUID) -> str:
    """Return the key of the first e-mail of a request."""
    return events.event_id(uuid_of(request_id), RequestCreated.type, 1)


async def _add_first(connection: Connection, request_ids: Sequence[UUID]) -> bool:
    """Add the first e-mails of locked requests, those that do not exist. False when there is none to add."""
    added = await connection.execute(
        """
        INSERT INTO email (event_id, request_id)
        SELECT event_id, request_id
          FROM unnest($1::text[], $2::uuid[]) AS first (event_id, request_id)
         ORDER BY event_id -- as a consumer does, or the two could deadlock
        ON CONFLICT (event_id) DO NOTHING
        """,
        [first_key(request_id) for request_id in request_ids],
        request_ids,
    )
    return added != "INSERT 0 0"


async def add_again(connection: Connection, keys: Mapping[str, UUID]) -> dict[UUID, str]:
    """Record that another e-mail is to be sent after each of these, in the caller's transaction.

    *keys* are those of the e-mails, with their requests. Returns the new keys by request. An e-mail that is
    pending, or is not the last of its request, gets none, nor does one of an erased request.
    """
    requests = await reading.lock(connection, set(keys.values()))
    rows = await connection.fetch(
        """
        INSERT INTO email (event_id, request_id)
        SELECT min(event_id) || '.' || (count(*) + 1), request_id
          FROM email
         WHERE request_id = ANY($2)
         GROUP BY request_id
        HAVING bool_and(state <> 'pending')
           AND (array_agg(event_id ORDER BY length(event_id) DESC, event_id DESC))[1] = ANY($1)
        RETURNING request_id, event_id
        """,
        list(keys),
        list(requests),
    )
    return {row["request_id"]: row["event_id"] for row in rows}
