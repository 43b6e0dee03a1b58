"""Erases requests: deletes their personal data, and records in erased_request that they existed."""

from collections.abc import Sequence
from uuid import UUID

from service.calculation_requests import email_changes
from service.calculation_requests.changing import change_all
from service.outbox.events import RequestErased
from service.postgres.pool import Connection


async def erase(connection: Connection, request_ids: Sequence[UUID]) -> set[UUID]:
    """Erase requests in the caller's transaction. Returns the ids of those that existed.

    Pending e-mails, even those not recorded yet, are cancelled, and announced as failed. One that is being
    sent may still arrive. Events are kept, without what the firm chose. If a relay is publishing an event,
    this waits for it.
    """
    async with change_all(connection, request_ids) as requests:
        await email_changes.cancel(connection, requests)
        for request in requests.values():
            request.announce(RequestErased)
    found = list(requests)
    # The mail server's replies may quote addresses.
    await connection.execute("UPDATE email SET server_reply = NULL WHERE request_id = ANY($1)", found)
    await connection.execute(_LOCK_POINTERS, found)
    await connection.execute(_STRIP_EVENTS, found)
    await connection.execute(_REPLACE_ROWS, found)
    return set(found)


# A relay locks the first event of a request, then reads it. So it has published the event as it was, or reads
# it without what the firm chose. The order is that in which the relay settles events, so the two do not
# deadlock.
_LOCK_POINTERS = """
    SELECT
      FROM outbox
     WHERE request_id = ANY($1)
     ORDER BY request_id, sequence
       FOR UPDATE
"""

# Sets what the firm chose to null. The other bytes, and the order of the keys, stay as they were sent.
_STRIP_EVENTS = """
    UPDATE event
       SET data = (SELECT '{' || string_agg(to_json(key) || ':' ||
                                            CASE WHEN key IN ('external_id', 'property_value') THEN 'null'
                                                 ELSE value::text END, ',' ORDER BY place) || '}'
                     FROM json_each(data) WITH ORDINALITY AS field (key, value, place))::json
     WHERE request_id = ANY($1)
       AND data -> 'external_id' IS NOT NULL -- not request.erased
"""
_REPLACE_ROWS = """
    WITH request AS (
        DELETE FROM calculation_request
         WHERE id = ANY($1)
        RETURNING *
    )
    INSERT INTO erased_request (id, conveyancer_id, created_at, calculation_id, key_sha256)
    SELECT id, conveyancer_id, created_at, calculation_id, sha256(convert_to(idempotency_key, 'UTF8'))
      FROM request
"""
