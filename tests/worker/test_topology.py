"""The topology: what is declared, and that declaring it again changes nothing."""

import pytest
from aio_pika import Message
from aio_pika.abc import AbstractChannel
from aio_pika.exceptions import ChannelPreconditionFailed

from tests.conftest import eventually
from tests.worker.conftest import count, publish, take
from worker import topology
from worker.topology import CALCULATION_RESULTS, NOTIFICATIONS, Queue

QUEUES = pytest.mark.parametrize("queue", [NOTIFICATIONS, CALCULATION_RESULTS], ids=lambda queue: queue.name)


@QUEUES
async def test_declaring_again_keeps_what_is_in_the_queues(channel: AbstractChannel, queue: Queue) -> None:
    await publish(channel, queue, b"kept")

    await topology.declare(channel)

    living = await channel.get_queue(queue.name)
    message = await eventually(lambda: take(living))
    assert message.body == b"kept"


@QUEUES
async def test_queue_refuses_to_be_anything_but_durable(channel: AbstractChannel, queue: Queue) -> None:
    with pytest.raises(ChannelPreconditionFailed):
        await channel.declare_queue(queue.name, durable=False)

    await channel.reopen()


@QUEUES
async def test_rejected_message_goes_to_the_dead_letters_of_its_queue(
    channel: AbstractChannel, queue: Queue
) -> None:
    await publish(channel, queue, b"rejected")
    message = await (await channel.get_queue(queue.name)).get()

    await message.reject()

    graveyard = await channel.get_queue(queue.dead_letters)
    dead = await eventually(lambda: take(graveyard))
    assert dead.body == b"rejected"
    assert dead.headers["x-death"][0]["queue"] == queue.name


async def test_events_of_other_kinds_do_not_reach_the_notifications(channel: AbstractChannel) -> None:
    exchange = await channel.get_exchange(topology.REQUESTS)

    await exchange.publish(Message(b"{}"), "request.calculated", mandatory=False)

    assert await count(channel, NOTIFICATIONS.name) == 0
