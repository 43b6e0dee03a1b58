"""Relay: pending events to a durable quorum queue, compared with relays from PyPI and the broker's limit.

Every side starts with a full outbox and the same empty queue. Its rate is that at which the queue fills, from
the first events until the last one is settled in the outbox, or until its time is up.
"""

import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from aio_pika.abc import AbstractChannel

from deploy.local.errors import LocalStackError
from service.postgres.pool import Connection
from tests.benchmarks import outboxes, subjects
from tests.benchmarks.comparison import PER_SECOND, Bar, Comparison, Figures, Measure, compare
from tests.benchmarks.outboxes import Outbox, Runs, our_relays, peer_relay
from tests.benchmarks.stand import Stand
from tests.harness import queues
from tests.harness.waiting import until
from worker.rabbitmq import topology

ONE, TWO = "ours", "ours, two processes"
TXOUTBOX, TXOUTBOX_TUNED = "txoutbox", "txoutbox, tuned"
FASTSTREAM, FASTSTREAM_TUNED = "faststream-outbox", "faststream-outbox, tuned"
ONE_AT_A_TIME = "one at a time"
WINDOW_LIMIT, SOCKET_LIMIT = "limit: aio-pika, no database", "limit: raw socket"

_BARS = (
    Bar(side=TWO, of=ONE, limit=1.0),
    Bar(side=ONE, of=TXOUTBOX, limit=4.0),
    Bar(side=ONE, of=TXOUTBOX_TUNED, limit=2.0),
    Bar(side=ONE, of=FASTSTREAM, limit=3.0),
    Bar(side=ONE, of=FASTSTREAM_TUNED, limit=3.0),
    Bar(side=ONE, of=ONE_AT_A_TIME, limit=12.0),
    Bar(side=ONE, of=WINDOW_LIMIT, limit=0.9),
    Bar(side=ONE, of=SOCKET_LIMIT, limit=0.5, is_aim=True),
)
_LIMITS = {WINDOW_LIMIT: "window_limit", SOCKET_LIMIT: "socket_limit"}

_START_SECONDS = 30.0
_SETTLE_SECONDS = 10.0
_PAUSE_SECONDS = 0.02


async def measure(stand: Stand) -> list[Comparison]:
    """Have every relay deliver the same events, or as many of them as it can in its time."""
    relays: dict[str, tuple[Outbox, Runs]] = {
        ONE: (outboxes.OURS, our_relays(stand)),
        TWO: (outboxes.OURS, our_relays(stand, 2)),
        TXOUTBOX_TUNED: (outboxes.TXOUTBOX, peer_relay(stand, "txoutbox_relay", "tuned")),
        TXOUTBOX: (outboxes.TXOUTBOX, peer_relay(stand, "txoutbox_relay", "default")),
        FASTSTREAM_TUNED: (outboxes.FASTSTREAM, peer_relay(stand, "faststream_relay", "tuned")),
        FASTSTREAM: (outboxes.FASTSTREAM, peer_relay(stand, "faststream_relay", "default")),
        ONE_AT_A_TIME: (outboxes.OURS, peer_relay(stand, "one_at_a_time")),
    }
    sides = {name: _relaying(stand, outbox, runs) for name, (outbox, runs) in relays.items()}
    sides |= {name: _publishing(stand, script) for name, script in _LIMITS.items()}
    return [await compare("relay", sides, _BARS, rounds=stand.sizes.rounds, settle=stand.settle)]


def _relaying(stand: Stand, outbox: Outbox, runs: Runs) -> Measure:
    async def measure() -> Figures:
        url = await outbox.open(stand)
        async with stand.connected(url) as connection:
            await outbox.refill(connection, stand.sizes.events)
            return await drained(stand, runs(url), connection, outbox.pending)

    return measure


def _publishing(stand: Stand, script: str) -> Measure:
    async def measure() -> Figures:
        (stand.folder / "event").write_bytes(subjects.event())
        publishing = stand.peer(script, str(stand.folder / "event"), str(stand.sizes.events))
        return await filled(stand, publishing, stand.sizes.events)

    return measure


async def drained(
    stand: Stand, running: AbstractAsyncContextManager[object], connection: Connection, pending: str
) -> Figures:
    """Return the rate at which events leave an outbox, until it is empty or the time is up."""

    async def is_settled() -> bool:
        return not await connection.fetchval(pending)

    events = await connection.fetchval(pending)
    return await filled(stand, running, events, is_settled=is_settled)


async def filled(
    stand: Stand,
    running: AbstractAsyncContextManager[object],
    events: int,
    *,
    is_settled: Callable[[], Awaitable[bool]] | None = None,
) -> Figures:
    """Return the rate at which what is *running* fills the queue with *events*."""
    async with queues.open_channel(stand.amqp_url) as channel:
        await _purge(channel)
        async with running:
            if not await until(lambda: _any(channel), seconds=_START_SECONDS, pause_seconds=_PAUSE_SECONDS):
                raise LocalStackError("Nothing is published.")
            first, began = await _count(channel), time.monotonic()

            async def is_full() -> bool:
                return await _count(channel) >= events

            full = await until(is_full, seconds=stand.sizes.relay_seconds, pause_seconds=_PAUSE_SECONDS)
            if full and is_settled is not None:
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
