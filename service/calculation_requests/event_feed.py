"""The feed of a firm: the kept events of all its requests, oldest first, in pages that a cursor connects."""

import re
from typing import Annotated, NamedTuple, Self
from uuid import UUID

import msgspec

from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.reading import LARGEST_PAGE
from service.outbox.events import CloudEvent, RequestEvent, in_envelope
from service.postgres.pool import Connection

LARGEST_LIMIT = 500
CURSOR = "[0-9a-f]{72}[0-7][0-9a-f]{7}"


class CursorOutdated(Exception):
    """The cursor comes from another server, or from this one before a failover or a restore."""


class Cursor(NamedTuple):
    """A place in the feed: after an event or, with zeros, before the first one."""

    server: str  # 24 hexadecimal digits: the server's system identifier and timeline
    transaction: int = 0
    request_id: UUID = UUID(int=0)
    sequence: int = 0

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the cursor that is written as *text*, or None if *text* is malformed."""
        if not re.fullmatch(CURSOR, text):
            return None
        return cls(text[:24], int(text[24:40], 16), UUID(text[40:72]), int(text[72:], 16))

    def __str__(self) -> str:
        return f"{self.server}{self.transaction:016x}{self.request_id.hex}{self.sequence:08x}"


class EventPage(msgspec.Struct, frozen=True):
    """A page of the feed: events as they are sent, but without `traceparent`, oldest first."""

    events: list[CloudEvent[RequestEvent]]
    after: Annotated[str, msgspec.Meta(description="For the next call, even if there are no events.")]
    more: Annotated[bool, msgspec.Meta(description="Whether the next page has events already.")]


async def read_page(
    connection: Connection, *, conveyancer_id: str, after: Cursor | None, limit: int
) -> EventPage:
    """Return at most *limit* events, and at most LARGEST_PAGE bytes of them, of this conveyancer.

    Raises UnknownConveyancer and CursorOutdated. A cursor grants no access: whatever it says, a page has only
    this conveyancer's events.
    """
    place = (after or Cursor(""))[1:]
    rows = await connection.fetch(_READ, conveyancer_id, *place, limit + 1)
    if not rows:
        raise UnknownConveyancer
    last = after or Cursor(rows[0]["server"])
    if last.server != rows[0]["server"] or not rows[0]["is_past"]:
        raise CursorOutdated
    events: list[CloudEvent[RequestEvent]] = []
    size = 0
    for row in rows if rows[0]["request_id"] else ():
        event = in_envelope(row)
        size += len(msgspec.json.encode(event))
        if len(events) == limit or size > LARGEST_PAGE:
            return EventPage(events, str(last), more=True)
        events.append(event)
        last = Cursor(last.server, row["transaction"], row["request_id"], row["sequence"])
    return EventPage(events, str(last), more=False)


# Events are in the order of their transactions (schema.sql). A page ends before the oldest transaction that
# is still open, so no event can later be committed before the end of the page. This needs no clock, no pause
# and no lock. But each open transaction that has written, in any database of the server, delays the feed.
#
# On another server or timeline, the same transactions may have other events. So a cursor names both. A copy
# of the disk has both, too, but may be older than the cursor, whose transaction is then not past. On a
# standby, which may lag, pg_current_wal_lsn fails.
#
# For a firm without new events, there is one row without an event. As in reading.py, the statement names all
# columns of the index, and the inner limit is a constant: one more than LARGEST_LIMIT.
_READ = """
    SELECT lpad(to_hex(system_identifier), 16, '0')
           || lower(left(pg_walfile_name(pg_current_wal_lsn()), 8)) AS server,
           $2 < pg_snapshot_xmin(pg_current_snapshot()) AS is_past,
           page.*
      FROM pg_control_system()
      JOIN active_conveyancer
        ON active_conveyancer.id = $1
      LEFT JOIN LATERAL (
        SELECT *
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
