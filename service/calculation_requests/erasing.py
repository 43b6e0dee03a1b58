"""Erases requests: deletes their personal data, and records in erased_request that they existed."""

from collections.abc import Sequence
from uuid import UUID

from service.calculation_requests import email_changes
from service.calculation_requests.changing import change_all
from service.outbox import lanes
from service.postgres.pool import Connection


async def erase(connection: Connection, request_ids: Sequence[UUID]) -> set[UUID]:
    """Erase requests in the caller's transaction. Returns the ids of those that existed.

    The transaction must hold the locks of the requests' lanes. Otherwise a relay could move an event while
    the event is changed here. Pending e-mails are cancelled, even if no worker has recorded them yet, and
    request.email_failed announces this. An e-mail that is being sent may still arrive.
    """
    async with change_all(connection, request_ids) as requests:
        await email_changes.cancel(connection, requests)
    found = list(requests)
    # The mail server's replies may quote addresses.
    await connection.execute("UPDATE email SET server_reply = NULL WHERE request_id = ANY($1)", found)
    lanes_of_found = list({lanes.lane_of(each) for each in found})
    for outbox in ("outbox", "outbox_held"):  # the events that are not published yet
        await connection.execute(_STRIP_EVENTS.format(outbox), lanes_of_found, found)
    await connection.execute(_REPLACE_ROWS, found)
    return set(found)


# Removes the external_id, which the firm chose, from unpublished events.
_STRIP_EVENTS = """
    UPDATE {}
       SET payload = convert_to(jsonb_set(convert_from(payload, 'UTF8')::jsonb,
                                          '{{data,external_id}}', 'null')::text, 'UTF8')
     WHERE lane = ANY($1)
       AND request_id = ANY($2)
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
