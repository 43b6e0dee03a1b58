"""Latency: from the commit of a request to a consumer, at several rates."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from aio_pika.abc import AbstractIncomingMessage

from service.outbox.lanes import RelayWaker
from service.postgres import connections
from service.postgres.pool import Pool, open_pool
from service.settings import Settings
from tests.benchmarks import outboxes
from tests.benchmarks.comparison import Bar, Comparison, Figures
from tests.benchmarks.http_load import P50, P99
from tests.benchmarks.measurements.create import OURS
from tests.benchmarks.outboxes import Outbox, relay_of
from tests.benchmarks.stand import POOL_SIZE, Stand
from tests.harness import queues
from tests.harness.examples import SECRET_KEYS
from tests.harness.waiting import until
from worker.rabbitmq import topology

TXOUTBOX, FASTSTREAM = "txoutbox, tuned", "faststream-outbox, tuned"

_QUANTILES = {P50: 0.5, P99: 0.99}
_NO_WORSE = tuple(Bar(side=OURS, of=TXOUTBOX, figure=each, kind="at most", limit=1.0) for each in (P50, P99))
_BARS: dict[int, Sequence[Bar]] = {  # by the requests stored a second
    1: _NO_WORSE,
    100: (
        *_NO_WORSE,
        Bar(side=OURS, figure=P50, kind="at most", limit=5.0),
        Bar(side=OURS, figure=P99, kind="at most", limit=30.0),
    ),
    1000: (*_NO_WORSE, Bar(side=OURS, figure=P99, kind="at most", limit=100.0)),
}

_WARM_SECONDS = 1.0
_STRAGGLER_SECONDS = 15.0
_SUBJECT = re.compile(rb'"subject":\s*"([^"]+)"')


async def measure(stand: Stand) -> list[Comparison]:
    """Store requests at each rate while a relay runs, and note when their events arrive."""
    sides = {OURS: outboxes.OURS, TXOUTBOX: outboxes.TXOUTBOX, FASTSTREAM: outboxes.FASTSTREAM}
    return [
        await stand.compare(
            f"latency at {rate} a second",
            {side: partial(_arrive, stand, outbox, rate) for side, outbox in sides.items()},
            bars,
        )
        for rate, bars in _BARS.items()
    ]


async def _arrive(stand: Stand, outbox: Outbox, rate: int) -> Figures:
    url = await outbox.open(stand)
    async with stand.connected(url) as connection:
        await connection.execute("TRUNCATE outbox")
    settings = Settings(
        database_url=url,
        app_url="https://app.example.com",
        request_secret_keys=SECRET_KEYS,
        database_pool_size=POOL_SIZE,
    )
    async with Arrivals.watched(stand) as arrivals, relay_of(stand, outbox)(url), open_pool(settings) as pool:
        await _store(outbox, pool, arrivals, rate=2, seconds=_WARM_SECONDS)
        await arrivals.complete()
        arrivals.forget()
        await _store(outbox, pool, arrivals, rate=rate, seconds=stand.sizes.seconds)
        await arrivals.complete()
    return arrivals.figures()


class Arrivals:
    """When each request was committed, and when its event reached a consumer."""

    def __init__(self) -> None:
        self.committed: dict[str, float] = {}
        self.arrived: dict[str, float] = {}

    @classmethod
    @asynccontextmanager
    async def watched(cls, stand: Stand) -> AsyncIterator["Arrivals"]:
        """Consume the queue that all relays publish to."""
        arrivals = cls()
        async with queues.open_channel(stand.amqp_url) as channel:
            queue = await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)
            await queue.purge()
            await queue.consume(arrivals.note, no_ack=True)
            yield arrivals

    async def note(self, message: AbstractIncomingMessage) -> None:
        """Note the arrival of an event."""
        found = _SUBJECT.search(message.body)
        assert found is not None
        self.arrived.setdefault(found[1].decode(), time.monotonic())

    async def complete(self) -> None:
        """Wait until every event has arrived. A missing event counts with the time waited for it."""

        def is_complete() -> bool:
            return self.committed.keys() <= self.arrived.keys()

        await until(is_complete, seconds=_STRAGGLER_SECONDS, pause_seconds=0.01)

    def forget(self) -> None:
        """Forget all commits and arrivals."""
        self.committed.clear()
        self.arrived.clear()

    def figures(self) -> Figures:
        """Return quantiles in milliseconds, those for which there are enough events."""
        now = time.monotonic()
        waits = sorted(
            max(0.0, self.arrived.get(uuid, now) - committed) * 1000
            for uuid, committed in self.committed.items()
        )
        return {
            name: waits[int(share * (len(waits) - 1))]
            for name, share in _QUANTILES.items()
            if len(waits) * (1 - share) >= 1
        }


async def _store(outbox: Outbox, pool: Pool, arrivals: Arrivals, *, rate: int, seconds: float) -> None:
    """Store *rate* requests a second, each at its time, even if earlier ones are not done."""
    waker = RelayWaker(pool, seconds=5.0)
    waking = asyncio.create_task(waker.run())
    turn = asyncio.Semaphore(POOL_SIZE)  # The queue of the pool has a bound.

    async def store() -> None:
        with waker.around_commit() as wakes:
            async with turn, connections.Acquired(pool, seconds=_STRAGGLER_SECONDS) as connection:
                uuid = await outbox.store(connection, wakes=wakes)
        arrivals.committed[uuid] = time.monotonic()
        if outbox is outboxes.OURS and not wakes:
            waker.wake()

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(round(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            group.create_task(store())
    waking.cancel()
