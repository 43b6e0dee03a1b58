"""The outboxes of the product and its peers: how each is filled, and what relays it."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import msgspec

from service.identifiers import new_request_id, uuid_of
from service.postgres.pool import Connection
from tests.benchmarks import subjects
from tests.benchmarks.stand import Stand

Runs = Callable[[str], AbstractAsyncContextManager[object]]  # given the URL of the database


class Outbox(msgspec.Struct, frozen=True, kw_only=True):
    """A table of events, in a database of its own."""

    database: str
    peer: str = ""  # the program that makes and relays it; none for the product's
    fill: str  # given the number of events, and the event
    append: str = ""  # given a request and its event; peers store no request
    pending: str = "SELECT count(*) FROM outbox"

    async def open(self, stand: Stand) -> str:
        """Return the URL of the database, with the table in it."""
        url = await stand.database(self.database, with_schema=not self.peer)
        if self.peer:
            await stand.run_peer(self.peer, "schema", DATABASE_URL=url)
        return url

    async def refill(self, connection: Connection, events: int) -> None:
        """Empty the table, and put *events* of as many requests into it."""
        await connection.execute("TRUNCATE outbox")
        await connection.execute(self.fill, events, subjects.event())
        await connection.execute("ANALYZE outbox")

    async def store(self, connection: Connection, *, wakes: bool) -> str:
        """Store one more event, the product's with its request; return the uuid of the request.

        *wakes* is for the product, whose commits seldom wake the relay. Those of its peers always do.
        """
        if not self.append:
            return await subjects.store(connection, wakes=wakes)
        uuid = uuid_of(new_request_id())
        await connection.execute(self.append, uuid, subjects.event(uuid))
        return uuid


OURS = Outbox(
    database="relay",
    fill="""
        INSERT INTO outbox (lane, request_id, type, sequence, payload)
        SELECT ('x' || right(id::text, 1))::bit(4)::int, id, 'request.created', 1, $2
          FROM (SELECT gen_random_uuid() AS id
                  FROM generate_series(1, $1::int)) AS request
        """,
)
TXOUTBOX = Outbox(
    database="txoutbox",
    peer="txoutbox_relay",
    fill="""
        INSERT INTO outbox (topic, key, payload)
        SELECT 'request.created', gen_random_uuid()::text, $2
          FROM generate_series(1, $1::int)
        """,
    append="INSERT INTO outbox (topic, key, payload, headers) VALUES ('request.created', $1, $2, '{}')",
    pending="SELECT count(*) FROM outbox WHERE status = 'pending'",
)
FASTSTREAM = Outbox(
    database="faststream",
    peer="faststream_relay",
    fill="""
        INSERT INTO outbox (queue, payload, headers)
        SELECT 'requests', $2,
               jsonb_build_object('content-type', 'application/json', 'correlation_id', gen_random_uuid())
          FROM generate_series(1, $1::int)
        """,
    append="""
        INSERT INTO outbox (queue, payload, headers)
        VALUES ('requests', $2,
                jsonb_build_object('content-type', 'application/json', 'correlation_id', $1::text))
        RETURNING id, pg_notify('outbox_outbox', queue)
        """,
)


def our_relays(stand: Stand, processes: int = 1) -> Runs:
    """Return a context manager that runs the product's relay in as many processes."""

    @asynccontextmanager
    async def runs(url: str) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for _ in range(processes):
                await stack.enter_async_context(stand.worker(url, "relay", ready=False))
            yield

    return runs


def relay_of(stand: Stand, outbox: Outbox) -> Runs:
    """Return a context manager that runs the relay of an outbox."""
    if not outbox.peer:
        return our_relays(stand)
    return lambda url: stand.peer(outbox.peer, "relay", DATABASE_URL=url)
