"""Erasing requests: their personal data is deleted, and erased_request keeps that they existed."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec

from service.every_firm import announcing, email_changes
from service.outbox import lanes
from service.postgres.pool import Connection

# Each has the events that have not been published.
_OUTBOXES = ("outbox", "outbox_held")


async def erase(connection: Connection, request_ids: Sequence[UUID]) -> set[UUID]:
    """Erase requests, in the caller's transaction. Returns those that there were.

    The transaction must have locked their lanes, or a relay could move an event while it is changed here.
    Pending e-mails are cancelled, also those that have not begun: request.email_failed says so. One that a
    process has in hand may arrive all the same.
    """
    found = list(await announcing.lock(connection, request_ids))
    if found:
        await email_changes.cancel(connection, found)
        # The mail server's replies may quote addresses.
        await connection.execute("UPDATE email SET server_reply = NULL WHERE request_id = ANY($1)", found)
        for outbox in _OUTBOXES:
            await _strip_events(connection, outbox, found)
        await connection.execute(_REPLACE_ROWS, found)
    return set(found)


_REPLACE_ROWS = """
    WITH request AS (
        DELETE FROM calculation_request
         WHERE id = ANY($1)
        RETURNING *
    )
    INSERT INTO erased_request (id, conveyancer_id, created_at, sequence, calculation_id,
                                calculation_sequence, calculated_at, key_sha256)
    SELECT id, conveyancer_id, created_at, sequence, calculation_id,
           calculation_sequence, calculated_at, sha256(convert_to(idempotency_key, 'UTF8'))
      FROM request
"""


async def _strip_events(connection: Connection, outbox: str, request_ids: Sequence[UUID]) -> None:
    """Take the external_id, which the firm chose, out of unpublished events."""
    rows = await connection.fetch(
        f"""
        SELECT lane, id, payload
          FROM {outbox}
         WHERE lane = ANY($1)
           AND request_id = ANY($2)
        """,  # noqa: S608 - constants only
        list({lanes.lane_of(each) for each in request_ids}),
        request_ids,
    )
    await connection.execute(
        f"""
        UPDATE {outbox} AS event
           SET payload = stripped.payload
          FROM unnest($1::smallint[], $2::bigint[], $3::bytea[]) AS stripped (lane, id, payload)
         WHERE event.lane = stripped.lane
           AND event.id = stripped.id
        """,  # noqa: S608 - constants only
        [row["lane"] for row in rows],
        [row["id"] for row in rows],
        [_without_external_id(row["payload"]) for row in rows],
    )


def _without_external_id(payload: bytes) -> bytes:
    event = msgspec.json.decode(payload, type=dict[str, Any])
    event["data"]["external_id"] = None
    return msgspec.json.encode(event)
