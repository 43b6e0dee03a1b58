"""The outboxes of the product and of its peers: how each is filled, relayed, and how fast it empties."""

from contextlib import AbstractAsyncContextManager
from functools import partial

import msgspec

from service.postgres.pool import Connection
from tests.benchmarks import subjects
from tests.benchmarks.comparison import Figures
from tests.benchmarks.rate import rate_of
from tests.benchmarks.stand import Stand, peer_command
from tests.harness import queues, stored
from tests.harness.processes import Process
from worker.rabbitmq import topology

_EVENTS = 50_000  # pending when a relay starts
_DRAIN_SECONDS = 8.0  # at most


class Outbox(msgspec.Struct, frozen=True, kw_only=True):
    """A table of events, in a database of its own."""

    side: str
    peer: str = ""  # the program that makes and relays it; none for the product's
    fill: str  # given the number of events, and the event
    append: str = ""  # given a request and its event; the peer stores no request
    pending: str = "SELECT count(*) FROM outbox"

    async def open(self, stand: Stand) -> str:
        """Return the URL of the database, with the table in it."""
        url = await stand.database(self.peer or "relay", with_schema=not self.peer)
        if self.peer:
            await stand.run(self.peer, peer_command(self.peer, "schema"), DATABASE_URL=url)
        return url

    async def refill(self, connection: Connection, events: int = _EVENTS) -> None:
        """Empty the table, and put *events* of as many requests into it."""
        _, event = subjects.new_event()
        await connection.execute("TRUNCATE outbox")
        await connection.execute(self.fill, events, event)
        await connection.execute("ANALYZE outbox")

    async def store(self, connection: Connection) -> str:
        """Store one more event, the product's with its request; return the uuid of the request."""
        if not self.peer:
            return await subjects.store(connection)
        uuid, event = subjects.new_event()
        await connection.execute(self.append, uuid, event)
        return uuid

    def relay(self, stand: Stand, url: str) -> AbstractAsyncContextManager[Process]:
        if not self.peer:
            return stand.worker(url, "relay", ready=False)
        return stand.peer(self.peer, "relay", DATABASE_URL=url)

    async def drain(self, stand: Stand, connection: Connection, url: str) -> Figures:
        """Relay what is pending to an empty queue, until all is settled or the time is up."""
        events: int = await connection.fetchval(self.pending)
        async with queues.open_channel(stand.amqp_url) as channel:

            async def delivered() -> int:
                """Count what is in the queue and, once that is all, only what has left the outbox."""
                published = await queues.count(channel, topology.NOTIFICATIONS.name)
                return published if published < events else events - await connection.fetchval(self.pending)

            queue = await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)
            await queue.purge()
            async with self.relay(stand, url) as relay:
                meter = partial(stand.meter, relay)
                figures = await rate_of(delivered, events, meter, seconds=_DRAIN_SECONDS)
            await queue.purge()
        return figures


OURS = Outbox(side="ours", fill=stored.FILL_OUTBOX)
TXOUTBOX = Outbox(
    side="txoutbox, tuned",
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
    side="faststream-outbox, tuned",
    peer="faststream_relay",
    fill="""
        INSERT INTO outbox (queue, payload, headers)
        SELECT 'request.created', $2, '{"content-type": "application/octet-stream"}'
          FROM generate_series(1, $1::int)
        """,
)
