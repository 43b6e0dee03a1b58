"""Many messages at once: each has its own outcome."""

import asyncio

import pytest

from service.identifiers import new_request_id, uuid_of
from service.outbox.lanes import RelayWaker
from tests.harness.in_process import running
from tests.harness.queues import count, holds
from tests.harness.waiting import eventually
from tests.worker.conftest import publish, store, take_all
from worker.consumers import calculations
from worker.consumers.consumer import InHand
from worker.rabbitmq.connection import open_channel
from worker.rabbitmq.topology import CALCULATION_RESULTS, NOTIFICATIONS

GOOD = 250


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


@pytest.mark.parametrize("outcome", ["handled", "returned"])
async def test_message_that_cannot_be_settled_gives_the_channel_up(worker_settings, channel, outcome):
    await publish(channel, NOTIFICATIONS, b"1")
    async with open_channel(worker_settings, name="test") as own_channel:
        in_hand = InHand()
        message = await (await own_channel.get_queue(NOTIFICATIONS.name, ensure=False)).get()
        await message.ack()

        await in_hand.settle(message, outcome)

    assert in_hand.leaving.is_set()
