"""The dead letters of a queue are counted while it is consumed."""

import asyncio

from aio_pika import Message
from aio_pika.abc import AbstractChannel

from tests.harness.metrics import value
from tests.harness.waiting import eventually
from worker.rabbitmq import connection, topology
from worker.rabbitmq.connection import open_role
from worker.rabbitmq.topology import NOTIFICATIONS


def counted() -> float:
    return value("consumer_dead_letters", queue=NOTIFICATIONS.name)


async def add_dead_letters(channel: AbstractChannel, number: int) -> None:
    exchange = await channel.get_exchange(topology.DEAD_LETTERS)
    for _ in range(number):
        await exchange.publish(Message(b"dead"), NOTIFICATIONS.dead_letters, mandatory=True)


async def test_dead_letters_that_come_and_go_are_counted(worker_settings, channel, monkeypatch):
    monkeypatch.setattr(connection, "_DECLARE_SECONDS", 0.02)
    async with open_role(worker_settings, name=NOTIFICATIONS.name, needs=[]):
        await add_dead_letters(channel, 3)
        await eventually(lambda: counted() == 3)
        await (await channel.get_queue(NOTIFICATIONS.dead_letters)).purge()
        await eventually(lambda: counted() == 0)
        await channel.queue_delete(NOTIFICATIONS.dead_letters)
        await asyncio.sleep(0.1)
        assert counted() == 0  # The queue is declared again.
