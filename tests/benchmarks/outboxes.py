"""The relay: its rate and latency, compared with those of the fastest relay found on PyPI."""

import asyncio
import re
import time
from contextlib import AbstractAsyncContextManager
from functools import partial

import msgspec
from aio_pika.abc import AbstractIncomingMessage

from deploy.local.errors import LocalStackError
from service.calculation_requests.model import CalculationRequest
from service.outbox import asyncapi
from service.outbox.events import RequestCreated
from service.outbox.waking import RelayWaker
from service.postgres import connections
from service.postgres.pool import Connection, open_pool
from service.settings import Settings
from service.telemetry import tracing
from tests.benchmarks.stand import COLUMNS, POOL_SIZE, Bar, Figures, Stand, peer_command
from tests.harness import databases, stored
from tests.harness.processes import Process
from tests.harness.queues import count, open_channel
from tests.harness.waiting import until
from worker.rabbitmq import topology

_QUEUE = topology.NOTIFICATIONS.name  # all relays publish to it
_EVENTS = 50_000  # pending when a relay starts
_P50, _P99 = "p50 ms", "p99 ms"
# By requests a second.
_LATENCIES = {1: {_P50: 1.5}, 100: {_P50: 1.25, _P99: 1.25}, 1000: {_P50: 1.25, _P99: 1.25}}
# Of 500 waits, only five are above the p99: one slow moment of the machine would decide it.
_WAITS = 2_000
_SUBJECT = re.compile(rb'"subject":\s*"([^"]+)"')


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

    async def store(self, connection: Connection) -> str:
        """Store one more event, the product's with its request; return the uuid of the request."""
        request = stored.new_request(**COLUMNS)
        if self.peer:
            await connection.execute(self.append, request.uuid, _created(request))
        else:
            await stored.insert(connection, request, traceparent=tracing.onward(None))
        return request.uuid

    def relay(self, stand: Stand, url: str) -> AbstractAsyncContextManager[Process]:
        if not self.peer:
            return stand.worker(url, "relay")
        return stand.running(self.peer, peer_command(self.peer, "relay"), url, ready=False)


def _created(request: CalculationRequest) -> bytes:
    event = request.event(RequestCreated, sequence=1)
    return msgspec.json.encode(asyncapi.example_of(event, traceparent=tracing.onward(None)))


_OURS = Outbox(side="ours", fill=stored.FILL_OUTBOX)
_TXOUTBOX = Outbox(
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


async def measure_rate(stand: Stand) -> list[bool]:
    sides = {outbox.side: partial(_drain, stand, outbox) for outbox in (_OURS, _TXOUTBOX)}
    return [await stand.compare("relay", sides, [Bar(side=_TXOUTBOX.side, of=_OURS.side, limit=2.7)])]


async def _drain(stand: Stand, outbox: Outbox) -> Figures:
    """Relay a full outbox to an empty queue, until all is settled or the time is up.

    The rate is that at which the queue fills and, once it has every event, the outbox empties.
    """
    url = await outbox.open(stand)
    async with databases.connected(url) as connection, open_channel(stand.amqp_url) as channel:
        await connection.execute("TRUNCATE outbox")
        await connection.execute(outbox.fill, _EVENTS, _created(stored.new_request(**COLUMNS)))
        await connection.execute("ANALYZE outbox")

        async def delivered() -> int:
            published = await count(channel, _QUEUE)
            return published if published < _EVENTS else _EVENTS - await connection.fetchval(outbox.pending)

        queue = await channel.get_queue(_QUEUE, ensure=False)
        await queue.purge()
        async with outbox.relay(stand, url) as relay:
            figures = await stand.rate_of(relay, delivered, _EVENTS)
        await queue.purge()
    return figures


async def measure_latency(stand: Stand) -> list[bool]:
    """Measure how long an event takes from its commit to a consumer, at several rates."""
    ratio = partial(Bar, side=_OURS.side, of=_TXOUTBOX.side, kind="at most")
    return [
        await stand.compare(
            f"latency at {rate} a second",
            {outbox.side: partial(_arrive, stand, outbox, rate) for outbox in (_OURS, _TXOUTBOX)},
            [ratio(figure=figure, limit=limit) for figure, limit in limits.items()],
        )
        for rate, limits in _LATENCIES.items()
    ]


async def _arrive(stand: Stand, outbox: Outbox, rate: int) -> Figures:
    url = await outbox.open(stand)
    async with databases.connected(url) as connection:
        await connection.execute("TRUNCATE outbox")
    turn = asyncio.Semaphore(POOL_SIZE)  # The queue of the pool has a bound.
    stored_at: dict[str, float] = {}  # by the uuid of a request
    arrived_at: dict[str, float] = {}

    async def note(message: AbstractIncomingMessage) -> None:
        arrived_at.setdefault(_SUBJECT.findall(message.body)[0].decode(), time.monotonic())

    open_own_pool = open_pool(Settings(database_url=url, database_pool_size=POOL_SIZE))
    async with open_channel(stand.amqp_url) as channel, outbox.relay(stand, url), open_own_pool as pool:
        queue = await channel.get_queue(_QUEUE, ensure=False)
        await queue.purge()
        await queue.consume(note, no_ack=True)
        waker = RelayWaker(pool, seconds=5.0)

        async def store() -> None:
            async with turn, connections.acquired(pool, seconds=15.0) as connection:
                uuid = await outbox.store(connection)
            stored_at[uuid] = time.monotonic()
            if outbox is _OURS:
                waker.wake()

        waking = asyncio.create_task(waker.run())
        seconds = max(stand.seconds, min(_WAITS / rate, 20.0))
        # The first two events show that the relay runs.
        for number, pause in [(2, 0.5), (round(rate * seconds), 1 / rate)]:
            stored_at.clear()
            began = time.monotonic()
            async with asyncio.TaskGroup() as group:  # on time, even if earlier ones are not stored
                for each in range(number):
                    await asyncio.sleep(max(0.0, began + each * pause - time.monotonic()))
                    group.create_task(store())
            if not await until(lambda: stored_at.keys() <= arrived_at.keys(), seconds=15.0):
                missing = stored_at.keys() - arrived_at.keys()
                raise LocalStackError(f"Of {number} events, {len(missing)} did not arrive.")
        waking.cancel()
    waits = sorted(max(0.0, arrived_at[uuid] - since) * 1000 for uuid, since in stored_at.items())
    return {name: waits[int(share * (len(waits) - 1))] for name, share in ((_P50, 0.5), (_P99, 0.99))}
