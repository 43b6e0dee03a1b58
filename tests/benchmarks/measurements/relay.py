"""Relay: pending events to a durable quorum queue, compared with relays from PyPI.

Every side starts with a full outbox and the same empty queue. Its rate is that at which the queue fills, from
the first events until the last one is settled in the outbox, or until its time is up.
"""

import time
from contextlib import AbstractAsyncContextManager
from functools import partial

from aio_pika.abc import AbstractChannel

from deploy.local.errors import LocalStackError
from service.postgres.pool import Connection
from tests.benchmarks import outboxes
from tests.benchmarks.comparison import PER_SECOND, Bar, Comparison, Figures, Measure
from tests.benchmarks.outboxes import Outbox, Runs, our_relays, relay_of
from tests.benchmarks.stand import Stand
from tests.harness import queues
from tests.harness.waiting import until
from worker.rabbitmq import topology

ONE, TWO = "ours", "ours, two processes"
TXOUTBOX, FASTSTREAM = "txoutbox, tuned", "faststream-outbox, tuned"

_BARS = (
    Bar(side=TWO, of=ONE, limit=1.0),
    Bar(side=ONE, of=TXOUTBOX, limit=2.0),
    Bar(side=ONE, of=FASTSTREAM, limit=3.0),
)

_START_SECONDS = 30.0
_SETTLE_SECONDS = 10.0
_PAUSE_SECONDS = 0.02


async def measure(stand: Stand) -> list[Comparison]:
    """Have every relay deliver the same events, or as many of them as it can in its time."""
    sides: dict[str, Measure] = {
        ONE: partial(_relay, stand, outboxes.OURS, our_relays(stand)),
        TWO: partial(_relay, stand, outboxes.OURS, our_relays(stand, 2)),
        TXOUTBOX: partial(_relay, stand, outboxes.TXOUTBOX, relay_of(stand, outboxes.TXOUTBOX)),
        FASTSTREAM: partial(_relay, stand, outboxes.FASTSTREAM, relay_of(stand, outboxes.FASTSTREAM)),
    }
    return [await stand.compare("relay", sides, _BARS)]


async def _relay(stand: Stand, outbox: Outbox, runs: Runs) -> Figures:
    url = await outbox.open(stand)
    async with stand.connected(url) as connection:
        await outbox.refill(connection, stand.sizes.events)
        return await drained(stand, runs(url), connection, outbox.pending)


async def drained(
    stand: Stand, running: AbstractAsyncContextManager[object], connection: Connection, pending: str
) -> Figures:
    """Return the rate at which what is *running* delivers an outbox, until it is empty or the time is up."""
    events: int = await connection.fetchval(pending)
    async with queues.open_channel(stand.amqp_url) as channel:

        async def is_full() -> bool:
            return await _count(channel) >= events

        async def is_settled() -> bool:
            return not await connection.fetchval(pending)

        await _purge(channel)
        async with running:
            if not await until(lambda: _any(channel), seconds=_START_SECONDS, pause_seconds=_PAUSE_SECONDS):
                raise LocalStackError("Nothing is published.")
            first, began = await _count(channel), time.monotonic()
            if await until(is_full, seconds=stand.sizes.relay_seconds, pause_seconds=_PAUSE_SECONDS):
                await until(is_settled, seconds=_SETTLE_SECONDS, pause_seconds=_PAUSE_SECONDS)
            count, seconds = await _count(channel), time.monotonic() - began
        await _purge(channel)
    return {PER_SECOND: (count - first) / seconds}


async def _any(channel: AbstractChannel) -> bool:
    return await _count(channel) > 0


async def _count(channel: AbstractChannel) -> int:
    return await queues.count(channel, topology.NOTIFICATIONS.name)


async def _purge(channel: AbstractChannel) -> None:
    queue = await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)
    await queue.purge()
