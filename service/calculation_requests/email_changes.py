"""Changes that operators make to the e-mails of requests: cancelling pending ones, and adding new ones.

The e-mail key of a request's first e-mail is the id of the request.created event that causes this e-mail.
For later e-mails a number, from 2 on, is appended. The Message-ID is made from the key.
"""

from collections.abc import Mapping, Sequence
from uuid import UUID

from service.calculation_requests import changing
from service.calculation_requests.changing import EmailEnd
from service.identifiers import uuid_of
from service.outbox import events
from service.outbox.events import RequestCreated
from service.postgres.pool import Connection


async def replace(connection: Connection, request_id: UUID, *, sends: bool) -> str | None:
    """Cancel the pending e-mails of a locked request, and record that a new one is to be sent.

    Returns the new e-mail's key. If request.created has not been consumed, the new e-mail is the first one,
    and the consumer adds none. Without *sends*, no e-mail is sent, and None is returned.
    """
    # While a consumer adds the first e-mail, `_add_first` waits. So the statements below see the e-mail.
    if await _add_first(connection, [request_id]) and sends:
        return first_email_key(request_id)
    await cancel(connection, [request_id])
    if not sends:
        return None
    sent = await connection.fetch("SELECT email_key FROM email WHERE request_id = $1", request_id)
    another = await add_again(connection, {row["email_key"]: request_id for row in sent})
    return another[request_id]


async def cancel(connection: Connection, request_ids: Sequence[UUID]) -> dict[UUID, str]:
    """Cancel the pending e-mails of these requests in the caller's transaction. Returns their keys.

    First e-mails that no consumer has recorded yet are recorded and cancelled. An e-mail that a worker has
    claimed may still be sent, because the worker may have read the row already.
    """
    requests = await changing.lock(connection, request_ids)
    await _add_first(connection, list(requests))
    rows = await connection.fetch(
        """
        SELECT email_key, request_id, traceparent
          FROM email
         WHERE request_id = ANY($1)
           AND state = 'pending'
         ORDER BY email_key
           FOR UPDATE
        """,
        list(requests),
    )
    ends = [
        EmailEnd(email_key, request_id, None, "cancelled", 0, traceparent)
        for email_key, request_id, traceparent in rows
    ]
    await changing.announce_ends(connection, ends, requests)
    return {end.request_id: end.email_key for end in ends}


def first_email_key(request_id: UUID) -> str:
    """Return the e-mail key of a request's first e-mail."""
    return events.event_id(uuid_of(request_id), RequestCreated.type, 1)


async def _add_first(connection: Connection, request_ids: Sequence[UUID]) -> bool:
    """Add the missing first e-mails of locked requests. Returns False if none was missing."""
    added = await connection.fetch(
        """
        INSERT INTO email (email_key, request_id)
        SELECT email_key, request_id
          FROM unnest($1::text[], $2::uuid[]) AS first (email_key, request_id)
         ORDER BY email_key -- as a consumer does: otherwise the two could deadlock
        ON CONFLICT (email_key) DO NOTHING
        RETURNING true
        """,
        [first_email_key(request_id) for request_id in request_ids],
        request_ids,
    )
    return bool(added)


async def add_again(connection: Connection, emails: Mapping[str, UUID]) -> dict[UUID, str]:
    """Add one new e-mail to each of these requests, in the caller's transaction.

    *emails* maps e-mail keys to requests. Returns the new keys by request. A request gets no e-mail if it
    was erased, if one of its e-mails is pending, or if its last e-mail is not in *emails*.
    """
    requests = await changing.lock(connection, set(emails.values()))
    rows = await connection.fetch(
        """
        INSERT INTO email (email_key, request_id)
        SELECT min(email_key) || '.' || (count(*) + 1), request_id
          FROM email
         WHERE request_id = ANY($2)
         GROUP BY request_id
        HAVING bool_and(state <> 'pending')
           AND (array_agg(email_key ORDER BY length(email_key) DESC, email_key DESC))[1] = ANY($1)
        RETURNING request_id, email_key
        """,
        list(emails),
        list(requests),
    )
    return {row["request_id"]: row["email_key"] for row in rows}
