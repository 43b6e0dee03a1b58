"""Changes to locked requests, and the events that announce them.

Every transaction locks requests before their e-mails, so that no two transactions deadlock.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Literal
from uuid import UUID

import msgspec

from service.calculation_requests.model import EventSource, now
from service.outbox import events, lanes
from service.outbox.events import Reason
from service.postgres.pool import Connection


async def lock(
    connection: Connection, request_ids: Collection[UUID], *, waits: bool = True
) -> dict[UUID, EventSource]:
    """Lock the rows of these requests until the transaction ends, and return those that exist.

    The locks keep each request's events in order. Rows are locked in the order of their ids, so that
    transactions with several requests do not deadlock.

    Without *waits*, rows that another transaction has locked are left out. So a row that is locked for
    minutes, for instance by hand, does not delay a batch.
    """
    rows = await connection.fetch(_LOCK if waits else f"{_LOCK} SKIP LOCKED", request_ids)
    return {row["id"]: EventSource(*row) for row in rows}


_LOCK = f"""
    SELECT {", ".join(EventSource.__struct_fields__)}
      FROM calculation_request
     WHERE id = ANY($1)
     ORDER BY id
       FOR NO KEY UPDATE
"""  # noqa: S608 - constants only


class Announcement(msgspec.Struct, frozen=True):
    """The next event of a locked request, and when it happened."""

    request_id: UUID
    event: events.RequestEvent
    time: datetime
    traceparent: str | None = None


async def announce(connection: Connection, announcements: Sequence[Announcement]) -> None:
    """Write events of locked requests to the outbox, and record the last sequence of each request."""
    rows = []
    for each in announcements:
        payload = events.encode(each.event, time=each.time, traceparent=each.traceparent)
        place = (lanes.lane_of(each.request_id), each.request_id, each.event.type, each.event.sequence)
        rows.append((*place, each.traceparent, payload))
    await connection.execute(
        """
        WITH announced AS (
            SELECT *
              FROM unnest($1::smallint[], $2::uuid[], $3::text[], $4::integer[], $5::text[], $6::bytea[])
                   AS event (lane, request_id, type, sequence, traceparent, payload)
        ), counted AS (
            UPDATE calculation_request
               SET sequence = last.sequence
              FROM (SELECT request_id, max(sequence) AS sequence
                      FROM announced
                     GROUP BY request_id) AS last
             WHERE id = last.request_id
        )
        INSERT INTO outbox (lane, request_id, type, sequence, traceparent, payload)
        SELECT lane, request_id, type, sequence, traceparent, payload
          FROM announced
         ORDER BY sequence
        """,
        *zip(*rows, strict=True),
    )


class EmailEnd(msgspec.Struct, frozen=True):
    """How a pending e-mail ended: it was sent, or failed for a reason."""

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
    connection: Connection, ends: Sequence[EmailEnd], requests: Mapping[UUID, EventSource]
) -> None:
    """Record and announce how pending e-mails ended. Their rows and the rows of *requests* must be locked.

    Claims are not checked, because a reply counts even if another process has claimed the e-mail since.
    """
    if not ends:
        return
    sequences = {request_id: request.sequence for request_id, request in requests.items()}
    ended_at = now()
    announcements = []
    for end in ends:
        sequences[end.request_id] += 1
        event = requests[end.request_id].email_event(
            sequence=sequences[end.request_id], reason=end.reason, smtp_code=end.smtp_code
        )
        announcements.append(Announcement(end.request_id, event, ended_at, end.traceparent))
    await connection.execute(
        _END,
        [end.email_key for end in ends],
        [end.reply for end in ends],
        [announcement.event.sequence for announcement in announcements],
        [None if end.reason is None else end.smtp_code for end in ends],
        [end.reason for end in ends],
        ended_at,
    )
    await announce(connection, announcements)


# Cancelling an e-mail is not counted as an attempt.
_END = """
    UPDATE email
       SET state = CASE WHEN ended.reason IS NULL THEN 'sent' ELSE 'failed' END,
           server_reply = coalesce(ended.server_reply, email.server_reply),
           attempts = attempts + (ended.reason IS DISTINCT FROM 'cancelled')::integer,
           claimed_by = NULL,
           settled_at = $6,
           event_sequence = ended.sequence,
           smtp_code = ended.smtp_code,
           reason = ended.reason
      FROM unnest($1::text[], $2::text[], $3::integer[], $4::integer[], $5::text[])
           AS ended (email_key, server_reply, sequence, smtp_code, reason)
     WHERE email.email_key = ended.email_key
"""
