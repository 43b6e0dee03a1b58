"""Latency: from the commit of a request to a consumer, at several rates."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from aio_pika.abc import AbstractIncomingMessage

from service.outbox.waking import RelayWaker
from service.postgres import connections
from service.postgres.pool import open_pool
from service.settings import Settings
from tests.benchmarks.comparison import P50, P99, Bar, Comparison, Figures
from tests.benchmarks.outboxes import OURS, TXOUTBOX, Outbox
from tests.benchmarks.rate import Waits, call_steadily
from tests.benchmarks.stand import POOL_SIZE, Stand, compare
from tests.harness import databases, queues
from worker.rabbitmq import topology

_LIMITS = {1: {P50: 1.5}, 100: {P50: 1.25, P99: 1.25}, 1000: {P50: 1.25, P99: 1.25}}  # by requests a second
_ACQUIRE_SECONDS = 15.0
# Of 500 waits, only five are above the p99: one slow moment of the machine would decide it.
_WAITS = 2_000
_LONGEST_SECONDS = 20.0
_SUBJECT = re.compile(rb'"subject":\s*"([^"]+)"')


async def measure(stand: Stand) -> list[Comparison]:
    return [
        await compare(
            f"latency at {rate} a second",
            {outbox.side: partial(_arrive, stand, outbox, rate) for outbox in (OURS, TXOUTBOX)},
            [
                Bar(side=OURS.side, of=TXOUTBOX.side, figure=figure, kind="at most", limit=limit)
                for figure, limit in limits.items()
            ],
            stand,
        )
        for rate, limits in _LIMITS.items()
    ]


async def _arrive(stand: Stand, outbox: Outbox, rate: int) -> Figures:
    url = await outbox.open(stand)
    async with databases.connected(url) as connection:
        await connection.execute("TRUNCATE outbox")
    settings = Settings(database_url=url, database_pool_size=POOL_SIZE)
    turn = asyncio.Semaphore(POOL_SIZE)  # The queue of the pool has a bound.
    async with _arrivals(stand) as waits, outbox.relay(stand, url), open_pool(settings) as pool:
        waker = RelayWaker(pool, seconds=5.0)

        async def store() -> None:
            async with turn, connections.acquired(pool, seconds=_ACQUIRE_SECONDS) as connection:
                uuid = await outbox.store(connection)
            waits.began[uuid] = time.monotonic()
            if outbox is OURS:
                waker.wake()

        waking = asyncio.create_task(waker.run())
        await call_steadily(store, rate=2, seconds=1)
        await waits.complete()
        waits.forget()
        seconds = max(stand.seconds, min(_WAITS / rate, _LONGEST_SECONDS))
        await call_steadily(store, rate=rate, seconds=seconds)
        await waits.complete()
        waking.cancel()
    return waits.figures()


@asynccontextmanager
async def _arrivals(stand: Stand) -> AsyncIterator[Waits]:
    """Consume the queue that all relays publish to, and note when the event of each request arrives."""
    waits = Waits()

    async def note(message: AbstractIncomingMessage) -> None:
        waits.end(_SUBJECT.findall(message.body)[0].decode())

    async with queues.open_channel(stand.amqp_url) as channel:
        queue = await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)
        await queue.purge()
        await queue.consume(note, no_ack=True)
        yield waits
