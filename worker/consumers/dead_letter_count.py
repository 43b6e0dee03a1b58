"""Counts the dead letters of a queue for the metrics, while the queue is consumed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from aio_pika.abc import AbstractChannel

from service.telemetry import logs
from service.telemetry.metrics import UNKNOWN
from worker import metrics
from worker.rabbitmq.connection import CLOSE_SECONDS
from worker.rabbitmq.topology import Queue
from worker.waiting import wait_at_most

COUNT_SECONDS = 15.0  # between counts

_log = structlog.get_logger()


@asynccontextmanager
async def counting(
    channel: AbstractChannel,
    queue: Queue,
    *,
    answer_seconds: float,
    count_seconds: float = COUNT_SECONDS,
) -> AsyncIterator[None]:
    """Count in the background of the block. The gauge is NaN after it, and after a count that failed.

    *channel* only lends its connection, which must not publish: during an alarm RabbitMQ reads nothing from a
    connection that does.
    """
    ended = asyncio.Event()  # aiormq may swallow the cancellation.
    task = asyncio.create_task(_keep_counting(channel, queue, ended, answer_seconds, count_seconds))
    try:
        yield
    finally:
        ended.set()
        task.cancel()
        await asyncio.wait([task], timeout=CLOSE_SECONDS)


async def _keep_counting(
    channel: AbstractChannel, queue: Queue, ended: asyncio.Event, answer_seconds: float, count_seconds: float
) -> None:
    gauge = metrics.consumer_dead_letters.labels(queue.name)
    try:
        while not ended.is_set():
            gauge.set(await _count(channel, queue.dead_letters, seconds=answer_seconds))
            await wait_at_most(count_seconds, ended)
    finally:
        gauge.set(UNKNOWN)


async def _count(channel: AbstractChannel, name: str, *, seconds: float) -> float:
    """Return how many messages are ready in a queue. NaN if RabbitMQ does not answer in time.

    It has a channel of its own, because aiormq closes one whose answer is late, and RabbitMQ one that names a
    missing queue. RabbitMQ answers 0 while the queue has no leader.
    """
    try:
        async with asyncio.timeout(seconds):
            connection = (await channel.get_underlay_channel()).connection
            own = await connection.channel(publisher_confirms=False)
            declared = await own.queue_declare(name, passive=True)
            await own.close()
    except Exception as error:  # noqa: BLE001 - the consumer works without it; the next count may succeed
        _log.warning("dead_letters_not_counted", error=logs.summarize(error))
        return UNKNOWN
    return declared.message_count or 0
