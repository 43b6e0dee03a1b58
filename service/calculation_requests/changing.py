"""The one way to change requests: it locks rows, orders the changes, and announces them.

Every transaction locks requests before their e-mails, so that no two transactions deadlock.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from service.calculation_requests import reading
from service.calculation_requests.model import EventSource
from service.outbox.events import RequestEvent
from service.postgres.connections import REPLICATE
from service.postgres.pool import Connection


class RequestLocked(Exception):
    """Another transaction has locked the request."""


class LockedRequest(EventSource, kw_only=True):
    """A request whose row is locked. `change_all` writes the columns that its block changes, and the events.

    Never log it: unlike EventSource, it has personal data and the salt of the secret.
    """

    updated_at: datetime
    locked_at: datetime  # by Postgres' clock, in whole seconds: the time of the changes and the events
    customer_email: str
    secret_salt: bytes
    secret_key_id: str
    withdrawn_at: datetime | None
    refused_calculation_id: str | None
    client_id: str | None = None  # of the API's caller, if it makes the change
    traceparent: str | None = None  # of its call
    announced: list[tuple[Any, ...]] = msgspec.field(default_factory=list)

    def announce(self, event: type[RequestEvent], *, traceparent: str | None = None, **facts: object) -> None:
        """Announce the next event of the request. *facts* are the fields that only this type has."""
        self.sequence += 1
        data = msgspec.json.encode(self.event(event, sequence=self.sequence, **facts)).decode()
        key, source = (self.id, self.sequence), (event.type, self.conveyancer_id, self.locked_at)
        self.announced.append((*key, *source, data, traceparent or self.traceparent))


_NO_COLUMNS = {"locked_at", "client_id", "traceparent", "announced"}
_COLUMNS = tuple(name for name in LockedRequest.__struct_fields__ if name not in _NO_COLUMNS)
_INVISIBLE = {"sequence", "refused_calculation_id"}  # to the firm, as is their change


@asynccontextmanager
async def change(connection: Connection, request_id: UUID) -> AsyncIterator[LockedRequest]:
    """Do what `change_all` does, for one request. Raises AlreadyErased and RequestNotFound."""
    async with change_all(connection, [request_id]) as found:
        if not found:
            await reading.raise_not_found(connection, request_id)
        yield found[request_id]


@asynccontextmanager
async def change_all(
    connection: Connection, request_ids: Collection[UUID], *, waits: bool = True
) -> AsyncIterator[dict[UUID, LockedRequest]]:
    """Lock these requests until the caller's transaction ends, and write what the block changes of them.

    Yields the requests that exist. Their locks keep each request's events in order. Rows are locked in the
    order of their ids, so that transactions do not deadlock. The commit waits for a standby in any case.
    Without *waits*, locked rows are left out, so that a row that is locked for minutes delays no batch.
    """
    rows = await connection.fetch(_LOCK if waits else f"{_LOCK} SKIP LOCKED", request_ids)
    if not rows:
        # A locked row makes the commit wait for a standby. Without one it must wait, too: the caller may rely
        # on another transaction's changes that no standby has yet, such as the end of an e-mail.
        await connection.execute(f"SELECT {REPLICATE}")
    requests = [LockedRequest(**row) for row in rows]
    before = [msgspec.structs.replace(request) for request in requests]
    yield {request.id: request for request in requests}
    changed = defaultdict(list)
    for request, earlier in zip(requests, before, strict=True):
        if columns := _changed_columns(request, earlier):
            changed[columns].append(request)
    for columns, alike in changed.items():
        assignments = ", ".join(f"{name} = ${place}" for place, name in enumerate(columns, 2))
        await connection.executemany(
            f"UPDATE calculation_request SET {assignments} WHERE id = $1",  # noqa: S608 - constants only
            [[getattr(request, name) for name in ("id", *columns)] for request in alike],
        )
    if announced := [row for request in requests for row in request.announced]:
        await connection.executemany(WRITE_EVENTS, announced)


_LOCK = f"""
    SELECT {", ".join(_COLUMNS)}, date_trunc('second', statement_timestamp()) AS locked_at
      FROM calculation_request
     WHERE id = ANY($1)
     ORDER BY id
       FOR NO KEY UPDATE
"""  # noqa: S608 - constants only


def _changed_columns(request: LockedRequest, earlier: LockedRequest) -> tuple[str, ...]:
    """Return the columns whose values differ. Moves updated_at if the firm can see the change."""
    columns = [name for name in _COLUMNS if getattr(request, name) != getattr(earlier, name)]
    if set(columns) - _INVISIBLE:
        # Not before an earlier change, whose transaction may have begun later.
        request.updated_at = max(earlier.updated_at, request.locked_at)
        columns.append("updated_at")
    return tuple(columns)


# The request's row is locked, so its previous event is visible. The transaction of that event may have a
# higher id: it may have begun later, and have locked the request earlier.
#
# If the request's first event in outbox is held, this one is held until the same time. A relay that settles
# the first event meanwhile does not see this one. If the relay holds the first event, this one is pending,
# but follows it, because no relay locks it before. If the relay deletes the first event, that event was due,
# so this one is due, too.
WRITE_EVENTS = """
    WITH kept AS (
        INSERT INTO event (request_id, sequence, type, conveyancer_id, time, data, transaction)
        VALUES ($1, $2, $3, $4, $5, $6,
                greatest(pg_current_xact_id(),
                         (SELECT transaction
                            FROM event
                           WHERE request_id = $1
                           ORDER BY sequence DESC
                           LIMIT 1)))
    )
    INSERT INTO outbox (request_id, sequence, traceparent, next_attempt_at)
    VALUES ($1, $2, $7,
            (SELECT next_attempt_at
               FROM outbox
              WHERE request_id = $1
              ORDER BY sequence
              LIMIT 1))
"""
