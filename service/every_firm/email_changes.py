"""How operators change the e-mails of requests: they cancel pending ones, and add further ones.

The first e-mail of a request is brought about by its request.created, and identified by the id of that event.
The event_id of the others is that of the first one and a number, from 2 on. The Message-ID is made from it.
"""

from collections.abc import Mapping, Sequence
from uuid import UUID

from service.every_firm import announcing
from service.every_firm.announcing import EmailEnd
from service.identifiers import uuid_of
from service.outbox import events
from service.outbox.events import RequestCreated
from service.postgres.pool import Connection


async def replace(connection: Connection, request_id: UUID, *, sends: bool) -> str | None:
    """End the pending e-mails of a locked request unsent, and record that another is to be sent.

    Returns its event_id. It is the first e-mail if request.created has not been consumed: the consumer then
    adds none. Without *sends* no e-mail is sent, not even that one.
    """
    # Waits for a consumer that is adding this e-mail, so that it is seen below.
    if await _add_first(connection, [request_id]) and sends:
        return first_event_id(request_id)
    await cancel(connection, [request_id])
    if not sends:
        return None
    sent = await connection.fetch("SELECT event_id FROM email WHERE request_id = $1", request_id)
    another = await add_again(connection, {row["event_id"]: request_id for row in sent})
    return another[request_id]


async def cancel(connection: Connection, request_ids: Sequence[UUID]) -> dict[UUID, str]:
    """End the pending e-mails of these requests unsent, in the caller's transaction, also those not begun.

    Returns their event_ids, by request. An e-mail that a worker has claimed may be sent all the same: the
    worker may have read its row already.
    """
    requests = await announcing.lock(connection, request_ids)
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
        EmailEnd(event_id, request_id, None, "cancelled", 0, traceparent)
        for event_id, request_id, traceparent in rows
    ]
    await announcing.announce_ends(connection, ends, requests)
    return {end.request_id: end.event_id for end in ends}


def first_event_id(request_id: UUID) -> str:
    """Return the event_id of the first e-mail of a request."""
    return events.event_id(uuid_of(request_id), RequestCreated.type, 1)


async def _add_first(connection: Connection, request_ids: Sequence[UUID]) -> bool:
    """Add the first e-mails of locked requests, those that do not exist. False when there is none to add."""
    added = await connection.execute(
        """
        INSERT INTO email (event_id, request_id)
        SELECT event_id, request_id
          FROM unnest($1::text[], $2::uuid[]) AS first (event_id, request_id)
         ORDER BY event_id -- as a consumer does: otherwise the two could deadlock
        ON CONFLICT (event_id) DO NOTHING
        """,
        [first_event_id(request_id) for request_id in request_ids],
        request_ids,
    )
    return added != "INSERT 0 0"


async def add_again(connection: Connection, emails: Mapping[str, UUID]) -> dict[UUID, str]:
    """Record that another e-mail is to be sent after each of these, in the caller's transaction.

    *emails* are their event_ids, with their requests. Returns the new ones by request. An e-mail that is
    pending, or is not the last of its request, gets none, nor does one of an erased request.
    """
    requests = await announcing.lock(connection, set(emails.values()))
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
        list(emails),
        list(requests),
    )
    return {row["request_id"]: row["event_id"] for row in rows}
