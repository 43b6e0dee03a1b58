"""Consumers: calculations recorded a second, and e-mails accepted by a mail server a second."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import aio_pika
import msgspec

from deploy.local.errors import LocalStackError
from service.outbox.events import CalculationCreated
from service.postgres.pool import Connection
from tests.benchmarks import subjects
from tests.benchmarks.comparison import PER_SECOND, Comparison, Figures, compare
from tests.benchmarks.smtp_sink import SmtpSink
from tests.benchmarks.stand import Stand
from tests.harness import queues
from tests.harness.waiting import until
from worker.rabbitmq import topology
from worker.rabbitmq.topology import Queue

_MESSAGES_A_SECOND = 8_000  # put into the queue for each second of a measurement
_EMAILS_A_SECOND = 2_000  # likewise
_START_SECONDS = 30.0
_PAUSE_SECONDS = 0.02

Done = Callable[[], Awaitable[int]]


async def measure(stand: Stand) -> list[Comparison]:
    """Fill a queue, start a worker, and count what it does."""
    url = await stand.database("consumers")

    async def calculations() -> Figures:
        async with stand.connected(url) as connection:
            uuids = await _stored(connection, _MESSAGES_A_SECOND * stand.sizes.seconds)

            async def recorded() -> int:
                count: int = await connection.fetchval("SELECT count(*) FROM outbox")
                return count

            bodies = [msgspec.json.encode(CalculationCreated(uuid, f"calculation-{uuid}")) for uuid in uuids]
            await _fill(stand, topology.CALCULATION_RESULTS, bodies)
            worker = stand.worker(url, "calculations", ready=False)
            return await _rate(stand, worker, recorded, len(bodies))

    async def notifications() -> Figures:
        async with stand.connected(url) as connection, SmtpSink() as sink:
            uuids = await _stored(connection, _EMAILS_A_SECOND * stand.sizes.seconds)

            async def accepted() -> int:
                return sink.accepted

            bodies = [subjects.event(uuid) for uuid in uuids]
            await _fill(stand, topology.NOTIFICATIONS, bodies)
            worker = stand.worker(
                url, "notifications", smtp_url=sink.url, ready=False, EMAIL_CONCURRENCY="32"
            )
            return await _rate(stand, worker, accepted, len(bodies))

    measured = {"calculations recorded": calculations, "e-mails accepted": notifications}
    return [
        await compare(name, {"ours": work}, rounds=stand.sizes.rounds, settle=stand.settle)
        for name, work in measured.items()
    ]


async def _stored(connection: Connection, count: int) -> list[str]:
    """Empty the tables and store requests, without their events."""
    await connection.execute("TRUNCATE calculation_request, outbox, outbox_held, email")
    async with connection.transaction():
        uuids = [await subjects.store(connection) for _ in range(count)]
    await connection.execute("TRUNCATE outbox")
    return uuids


async def _fill(stand: Stand, queue: Queue, bodies: Sequence[bytes]) -> None:
    async with queues.open_channel(stand.amqp_url) as channel:
        await (await channel.get_queue(queue.name, ensure=False)).purge()
        exchange = await channel.get_exchange(queue.exchange, ensure=False)
        messages = [
            aio_pika.Message(body, delivery_mode=2, message_id=str(number))
            for number, body in enumerate(bodies)
        ]
        for start in range(0, len(messages), 500):
            window = messages[start : start + 500]
            await asyncio.gather(*(exchange.publish(each, queue.routing_key) for each in window))


async def _rate(
    stand: Stand, worker: AbstractAsyncContextManager[object], done: Done, messages: int
) -> Figures:
    """Return how many a second are done, from the first one until all are, or the time is up."""

    async def has_begun() -> bool:
        return await done() > 0

    async def is_done() -> bool:
        return await done() >= messages

    async with worker:
        if not await until(has_begun, seconds=_START_SECONDS, pause_seconds=_PAUSE_SECONDS):
            raise LocalStackError("The worker does nothing.")
        first, began = await done(), time.monotonic()
        await until(is_done, seconds=stand.sizes.seconds, pause_seconds=_PAUSE_SECONDS)
        count, seconds = await done(), time.monotonic() - began
    return {PER_SECOND: (count - first) / seconds}
