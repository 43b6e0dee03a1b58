"""The dead letters of a queue are counted while it is consumed, at no cost to the consumer."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aio_pika import Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from tests.harness.in_process import running
from tests.harness.metrics import value
from tests.harness.queues import count
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.worker.conftest import passes, publish, settings_with
from tests.worker.consumers.conftest import MakeConsumer, Work
from worker.consumers.consumer import Consumer
from worker.consumers.dead_letter_count import counting
from worker.rabbitmq import topology
from worker.rabbitmq.connection import open_role
from worker.rabbitmq.topology import NOTIFICATIONS
from worker.settings import WorkerSettings


def counted(queue: str = NOTIFICATIONS.name) -> float:
    return value("consumer_dead_letters", queue=queue)


async def add_dead_letters(channel: AbstractChannel, number: int) -> None:
    exchange = await channel.get_exchange(topology.DEAD_LETTERS)
    for _ in range(number):
        await exchange.publish(Message(b"dead"), NOTIFICATIONS.dead_letters, mandatory=True)


@asynccontextmanager
async def counting_over(
    settings: WorkerSettings, link: TcpProxy, *, answer_seconds: float = 5.0, count_seconds: float = 0.02
) -> AsyncIterator[AbstractChannel]:
    """Count the dead letters of the notifications over *link*. Yields a channel of the same connection."""
    async with (
        open_role(settings_with(settings, amqp_url=link.url), name="test", needs=[]) as channel,
        counting(channel, NOTIFICATIONS, answer_seconds=answer_seconds, count_seconds=count_seconds),
    ):
        yield channel


async def test_dead_letters_that_come_and_go_are_counted(
    worker_settings: WorkerSettings, channel: AbstractChannel, broker_link: TcpProxy
) -> None:
    async with counting_over(worker_settings, broker_link):
        await add_dead_letters(channel, 3)
        await eventually(lambda: counted() == 3)

        await (await channel.get_queue(NOTIFICATIONS.dead_letters)).purge()
        await eventually(lambda: counted() == 0)

    assert math.isnan(counted())


async def test_dead_letters_are_counted_at_the_interval_and_not_more_often(
    worker_settings: WorkerSettings, channel: AbstractChannel, broker_link: TcpProxy
) -> None:
    await add_dead_letters(channel, 1)
    async with counting_over(worker_settings, broker_link, count_seconds=60.0):
        await eventually(lambda: counted() == 1)

        await add_dead_letters(channel, 1)
        for _ in range(100):  # round trips, in which another count would have ended
            assert await count(channel, NOTIFICATIONS.dead_letters) == 2

        assert counted() == 1


async def test_consumer_counts_the_dead_letters_of_its_own_queue_while_it_reads(
    consumer: Consumer[int], channel: AbstractChannel
) -> None:
    await add_dead_letters(channel, 2)

    async with running(consumer.run):
        await eventually(lambda: counted() == 2)

    assert math.isnan(counted())


async def test_count_without_an_answer_in_time_is_unknown_and_does_not_disturb_the_consumer(
    worker_settings: WorkerSettings, channel: AbstractChannel, broker_link: TcpProxy
) -> None:
    await add_dead_letters(channel, 2)
    arrived = asyncio.Queue[AbstractIncomingMessage]()
    async with counting_over(worker_settings, broker_link, answer_seconds=0.2) as consuming:
        await (await consuming.get_queue(NOTIFICATIONS.name)).consume(arrived.put)
        await eventually(lambda: counted() == 2)

        broker_link.hold_before(NOTIFICATIONS.dead_letters.encode())
        await eventually(lambda: math.isnan(counted()), seconds=5.0)
        await publish(channel, NOTIFICATIONS, b"1")
        message = await arrived.get()
        broker_link.resume()

        await eventually(lambda: counted() == 2)
        await message.ack()
        assert await count(consuming, NOTIFICATIONS.name) == 0
    assert broker_link.connections == 1
    assert await count(channel, NOTIFICATIONS.name) == 0


async def test_missing_dead_letter_queue_is_unknown_and_leaves_the_channel_open(
    worker_settings: WorkerSettings, channel: AbstractChannel, broker_link: TcpProxy
) -> None:
    async with counting_over(worker_settings, broker_link) as consuming:
        await eventually(lambda: counted() == 0)

        await channel.queue_delete(NOTIFICATIONS.dead_letters)
        await eventually(lambda: math.isnan(counted()))
        await topology.declare(channel)

        await eventually(lambda: counted() == 0)
        assert await count(consuming, NOTIFICATIONS.name) == 0


async def test_consumer_counts_again_after_an_outage_of_the_broker(
    consumer_with: MakeConsumer, work: Work, channel: AbstractChannel, broker_link: TcpProxy
) -> None:
    await add_dead_letters(channel, 1)
    consumer = consumer_with(amqp_url=broker_link.url)

    async with running(consumer.run):
        await eventually(lambda: counted() == 1)
        await broker_link.refuse()
        await eventually(lambda: math.isnan(counted()))

        broker_link.admit()

        await eventually(lambda: counted() == 1)
        await publish(channel, NOTIFICATIONS, b"1")
        await eventually(lambda: work.done == [1])
        assert await passes(consumer.check)
