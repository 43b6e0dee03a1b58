"""A message whose properties cannot be decoded is dead-lettered, and its neighbours are handled."""

from aio_pika import Message
from aio_pika.abc import AbstractChannel

from tests.harness.in_process import running
from tests.harness.queues import count, holds
from tests.harness.raw_messages import UNDECODABLE as RAW
from tests.harness.raw_messages import NotText, RawMessage
from tests.harness.waiting import eventually
from tests.worker.conftest import publish, take_all
from worker.rabbitmq.message_properties import UNDECODABLE
from worker.rabbitmq.topology import NOTIFICATIONS, Queue


async def publish_raw(channel: AbstractChannel, queue: Queue) -> None:
    """Publish one message for each way not to be decodable."""
    exchange = await channel.get_exchange(queue.exchange)
    for name, written in RAW.values():
        await exchange.publish(RawMessage(b"1", name, written), queue.routing_key)


async def test_messages_with_undecodable_properties_are_malformed_and_their_neighbours_are_handled(
    consumer, work, channel
):
    await publish_raw(channel, NOTIFICATIONS)
    for number in range(2, 22):
        await publish(channel, NOTIFICATIONS, str(number).encode())

    async with running(consumer.run):
        await eventually(lambda: len(work.done) == 20)
        await eventually(lambda: holds(channel, NOTIFICATIONS.dead_letters, len(RAW)))

    dead = await take_all(await channel.get_queue(NOTIFICATIONS.dead_letters))
    assert sorted(work.done) == list(range(2, 22))
    assert [letter.headers["x-reason"] for letter in dead] == ["Malformed"] * len(RAW)
    assert sorted(str(letter.headers[UNDECODABLE]) for letter in dead) == sorted(
        name for name, _ in RAW.values()
    )
    assert await count(channel, NOTIFICATIONS.name) == 0


async def test_routing_key_that_is_not_utf8_ends_no_connection(consumer, work, channel):
    exchange = await channel.get_exchange(NOTIFICATIONS.exchange)
    message = Message(b"1", headers={"CC": [NOTIFICATIONS.routing_key]})
    await exchange.publish(message, NotText("\xe9"), mandatory=True)

    async with running(consumer.run):
        await eventually(lambda: work.done == [1])
