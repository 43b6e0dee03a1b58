"""Many messages at once: each has its own outcome, and they cost the broker few acknowledgements."""

import asyncio

import pytest
from aio_pika.abc import AbstractIncomingMessage

from service.identifiers import new_request_id, uuid_of
from service.outbox.lanes import RelayWaker
from tests.harness.in_process import running
from tests.harness.queues import count, holds
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.worker.conftest import publish, settings_with, store, take, take_all
from worker.consumers import calculations
from worker.consumers.consumer import InHand
from worker.rabbitmq.connection import open_channel
from worker.rabbitmq.topology import CALCULATION_RESULTS, NOTIFICATIONS

GOOD = 250
BASIC_ACK = b"\x00\x3c\x00\x50"  # class and method of the frame


def result(uuid: str, calculation_id: str = "C-1") -> bytes:
    return f'{{"request_uuid": "{uuid}", "calculation_id": "{calculation_id}"}}'.encode()


async def test_each_of_many_results_has_its_own_outcome(worker_settings, pool, channel, database):
    async with database.transaction():
        requests = [await store(database) for _ in range(GOOD)]
    first, second, *_ = (request.uuid for request in requests)
    bodies = [result(request.uuid) for request in requests]
    bodies[100:100] = [b"{", result(uuid_of(new_request_id())), result(first, "C-2"), result(second)]
    await asyncio.gather(*(publish(channel, CALCULATION_RESULTS, body) for body in bodies))
    consumer = calculations.consumer(worker_settings, pool, RelayWaker(pool, seconds=5.0))

    async with running(consumer.run):
        await eventually(lambda: holds(channel, CALCULATION_RESULTS.name, 0))
        await eventually(lambda: holds(channel, CALCULATION_RESULTS.dead_letters, 3))
        recorded = "SELECT count(calculation_id) = $1 FROM calculation_request"
        await eventually(lambda: database.fetchval(recorded, GOOD))

    assert await database.fetchval("SELECT count(*) FROM outbox WHERE type = 'request.calculated'") == GOOD
    # A busy RabbitMQ passes acks on to a quorum queue later, and drops the last of them with the channel.
    assert await count(channel, CALCULATION_RESULTS.name) < GOOD / 5
    dead = await take_all(await channel.get_queue(CALCULATION_RESULTS.dead_letters))
    assert {letter.headers["x-reason"]: letter.headers["x-reason-text"] for letter in dead} == {
        "Malformed": "not readable JSON: it ends too early (byte 1)",
        "RequestNotFound": "request_uuid: there is no such request",
        "CalculationAlreadyRecorded": "calculation_id: the request has another calculation",
    }


async def nothing() -> None:
    """Deliver nothing: the test settles the messages itself."""


async def receive(in_hand: InHand, channel, number: int) -> list[AbstractIncomingMessage]:
    """Receive messages of the notifications on a channel."""
    queue = await channel.get_queue(NOTIFICATIONS.name, ensure=False)
    messages = [await queue.get() for _ in range(number)]
    for message in messages:
        in_hand.start(message, nothing())
    return messages


@pytest.mark.parametrize(("still_open", "frames"), [(None, 1), (0, 19), (10, 10), (19, 1)])
async def test_messages_before_an_open_one_share_an_ack(worker_settings, channel, still_open, frames):
    for number in range(20):
        await publish(channel, NOTIFICATIONS, str(number).encode())
    written: list[bytes] = []
    async with TcpProxy(worker_settings.amqp_url, lambda: written.append) as link:
        settings = settings_with(worker_settings, amqp_url=link.url)
        async with open_channel(settings, name="test") as own_channel:
            in_hand = InHand()
            for number, message in enumerate(await receive(in_hand, own_channel, 20)):
                if number != still_open:
                    in_hand.acknowledge(message)
            await in_hand.finish(seconds=5.0)

        await eventually(lambda: not link.is_open)
    assert b"".join(written).count(BASIC_ACK) == frames
    left = [] if still_open is None else [str(still_open).encode()]
    queue = await channel.get_queue(NOTIFICATIONS.name)
    assert [(await eventually(lambda: take(queue))).body for _ in left] == left
    assert await holds(channel, NOTIFICATIONS.name, 0)


async def test_acknowledgement_that_fails_gives_the_channel_up(worker_settings, channel):
    await publish(channel, NOTIFICATIONS, b"1")
    async with open_channel(worker_settings, name="test") as own_channel:
        in_hand = InHand()
        (message,) = await receive(in_hand, own_channel, 1)
        await message.ack()

        in_hand.acknowledge(message)
        await in_hand.finish(seconds=5.0)

    assert in_hand.leaving.is_set()
