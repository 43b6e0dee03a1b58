"""Erases requests: deletes their personal data, and records in erased_request that they existed."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec

from service.calculation_requests import changing, email_changes
from service.calculation_requests.event_history import RECORDED_COLUMNS
from service.outbox import lanes
from service.postgres.pool import Connection

# The tables of events that are not published yet.
_OUTBOXES = ("outbox", "outbox_held")


async def erase(connection: Connection, request_ids: Sequence[UUID]) -> set[UUID]:
    """Erase requests in the caller's transaction. Returns the ids of those that existed.

    The transaction must hold the locks of the requests' lanes. Otherwise a relay could move an event while
    the event is changed here. Pending e-mails are cancelled, even if no worker has recorded them yet, and
    request.email_failed announces this. An e-mail that is being sent may still arrive.
    """
    found = list(await changing.lock(connection, request_ids))
    if found:
        await email_changes.cancel(connection, found)
        # The mail server's replies may quote addresses.
        await connection.execute("UPDATE email SET server_reply = NULL WHERE request_id = ANY($1)", found)
        for outbox in _OUTBOXES:
            await _strip_events(connection, outbox, found)
        await connection.execute(_REPLACE_ROWS, found)
    return set(found)


_KEPT = ", ".join(("id", "conveyancer_id", "created_at", "sequence", *RECORDED_COLUMNS))
_REPLACE_ROWS = f"""
    WITH request AS (
        DELETE FROM calculation_request
         WHERE id = ANY($1)
        RETURNING *
    )
    INSERT INTO erased_request ({_KEPT}, key_sha256)
    SELECT {_KEPT}, sha256(convert_to(idempotency_key, 'UTF8'))
      FROM request
"""  # noqa: S608 - constants only


async def _strip_events(connection: Connection, outbox: str, request_ids: Sequence[UUID]) -> None:
    """Remove the external_id, which the firm chose, from unpublished events."""
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
