"""Reads the kept events of a request or a firm (its feed), for the API. They are shown as they are sent."""

from typing import Annotated
from uuid import UUID

import msgspec

from service.calculation_requests import reading
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.outbox.events import CloudEvent, RequestEvent, in_envelope
from service.postgres.pool import Connection


class CalculationRequestEvents(msgspec.Struct, frozen=True):
    """The events of a request so far, oldest first: as they are sent, but without `traceparent`."""

    events: list[CloudEvent[RequestEvent]]


class EventPage(CalculationRequestEvents, frozen=True):
    """A page of the events of a firm's requests, oldest first: as they are sent, without `traceparent`."""

    after: Annotated[str, msgspec.Meta(description="Send it for the next page. It is never null.")]
    more: Annotated[bool, msgspec.Meta(description="Whether the next page already has events.")]


class CursorOutdated(Exception):
    """This cursor is from before a failover or a restore: begin without it, and drop ids that you know."""


async def read(connection: Connection, request_id: UUID) -> CalculationRequestEvents:
    """Return the events of a request. The caller first finds the request, which checks who may read it."""
    rows = await connection.fetch(_READ, request_id)
    return CalculationRequestEvents([in_envelope(row) for row in rows])


_READ = """
    SELECT request_id, type, sequence, time, data
      FROM event
     WHERE request_id = $1
     ORDER BY sequence
"""

# A cursor is the server, and a place in its feed: transaction, id and sequence of an event, or zeros.
CURSOR = "[0-9a-f]{24}[0-9a-f]{16}[0-9a-f]{32}[0-7][0-9a-f]{7}"


async def read_feed(connection: Connection, conveyancer_id: str, *, after: str, limit: int) -> EventPage:
    """Return at most *limit* events of this conveyancer, and at most LARGEST_PAGE bytes of them.

    *after* is a cursor, or empty for the first page. Raises UnknownConveyancer and CursorOutdated.
    """
    last = after or "0" * 80
    place = (int(last[24:40], 16), UUID(last[40:72]), int(last[72:], 16))
    rows = await connection.fetch(_READ_FEED, conveyancer_id, *place, limit + 1)
    if not rows:
        raise UnknownConveyancer
    server: str = rows[0]["server"]
    if after and not (after.startswith(server) and rows[0]["is_kept"]):
        raise CursorOutdated
    events: list[CloudEvent[RequestEvent]] = []
    last, size = server + last[24:], 0
    for row in rows if rows[0]["request_id"] else ():
        event = in_envelope(row)
        size += len(msgspec.json.encode(event))
        if len(events) == limit or size > reading.LARGEST_PAGE:
            return EventPage(events, last, more=True)
        events.append(event)
        last = f"{server}{row['transaction']:016x}{row['request_id'].hex}{row['sequence']:08x}"
    return EventPage(events, last, more=False)


# Events are in the order of their transactions (schema.sql), and the feed ends before the oldest transaction
# that is open in any database of the server. So no event is committed before one that was read. A cursor
# names server and timeline, because others have other transactions. A copy of the disk, or of the database,
# has the same ones. If it is older than the cursor, it lacks the cursor's event. On a standby,
# pg_current_wal_lsn fails. Without new events, there is a row without an event. As in reading.py, all columns
# of the index are named, and the inner limit is constant.
_READ_FEED = """
    SELECT lpad(to_hex(system_identifier), 16, '0')
           || lower(left(pg_walfile_name(pg_current_wal_lsn()), 8)) AS server,
           $4 = 0 OR EXISTS (SELECT
                               FROM event
                              WHERE (conveyancer_id, transaction, request_id, sequence)
                                    = ($1, $2, $3, $4)) AS is_kept,
           page.*
      FROM pg_control_system()
      JOIN active_conveyancer ON id = $1
      LEFT JOIN (SELECT *
                   FROM (SELECT conveyancer_id, transaction, request_id, sequence, type, time, data
                           FROM event
                          WHERE (conveyancer_id, transaction, request_id, sequence) > ($1, $2, $3, $4)
                            AND (conveyancer_id, transaction) < ($1, pg_snapshot_xmin(pg_current_snapshot()))
                          ORDER BY conveyancer_id, transaction, request_id, sequence
                          LIMIT 501) AS oldest
                  ORDER BY conveyancer_id, transaction, request_id, sequence
                  LIMIT $5) AS page ON true
     ORDER BY transaction, request_id, sequence
"""


async def held_back_seconds(connection: Connection) -> float:
    """Return the age of the oldest event that the feeds do not have yet, or 0. Looks up one event a firm."""
    return float(await connection.fetchval(_HELD_BACK))


_HELD_BACK = """
    SELECT greatest(0, extract(epoch FROM now() - min(time)))
      FROM conveyancer
     CROSS JOIN LATERAL (SELECT time
                           FROM event
                          WHERE conveyancer_id = conveyancer.id
                            AND transaction >= pg_snapshot_xmin(pg_current_snapshot())
                          ORDER BY transaction
                          LIMIT 1) AS first
"""
