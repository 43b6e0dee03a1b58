"""No message is lost for its properties, whatever the broker lets through."""

import asyncio

import aio_pika
from aiormq.exceptions import AMQPError

from tests.harness.in_process import running
from tests.harness.queues import count, holds
from tests.harness.raw_messages import ILLEGAL, UNDECODABLE, RawMessage
from tests.harness.waiting import eventually
from tests.worker.conftest import publish, store, take_all
from worker.rabbitmq.topology import CALCULATION_RESULTS

PUBLISH_SECONDS = 5.0  # RabbitMQ may close the connection, or answer nothing.


def result(uuid: str) -> bytes:
    return f'{{"request_uuid": "{uuid}", "calculation_id": "C-1"}}'.encode()


async def is_accepted(amqp_url: str, body: bytes, name: str, written: bytes) -> bool:
    """Publish over a new connection, because a refusal closes it. Returns whether the broker confirmed."""
    try:
        async with await aio_pika.connect(amqp_url) as connection, asyncio.timeout(PUBLISH_SECONDS):
            channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            exchange = await channel.get_exchange(CALCULATION_RESULTS.exchange)
            message = RawMessage(body, name, written)
            await exchange.publish(message, CALCULATION_RESULTS.routing_key, mandatory=True)
    except (AMQPError, OSError, TimeoutError, asyncio.CancelledError):
        return False
    return True


async def test_each_illegal_property_is_refused_or_its_message_is_recorded_or_dead_lettered(
    worker_settings, calculation_consumer, channel, database
):
    async with database.transaction():
        requests = {what: await store(database) for what in ILLEGAL}
        good = await store(database)
    accepted = {
        what: requests[what]
        for what, (name, written) in ILLEGAL.items()
        if await is_accepted(worker_settings.amqp_url, result(requests[what].uuid), name, written)
    }

    async with running(calculation_consumer.run):
        await publish(channel, CALCULATION_RESULTS, result(good.uuid))
        is_recorded = "SELECT calculation_id IS NOT NULL FROM calculation_request WHERE id = $1"
        await eventually(lambda: database.fetchval(is_recorded, good.id))

        async def all_are_found() -> bool:
            dead = await count(channel, CALCULATION_RESULTS.dead_letters)
            recorded = await database.fetchval("SELECT count(calculation_id) FROM calculation_request")
            return bool(dead + recorded == len(accepted) + 1)

        await eventually(all_are_found)

    rows = await database.fetch("SELECT id FROM calculation_request WHERE calculation_id IS NOT NULL")
    dead = await take_all(await channel.get_queue(CALCULATION_RESULTS.dead_letters))
    assert {letter.headers["x-reason"] for letter in dead} == {"Malformed"}
    bodies = {letter.body for letter in dead}
    recorded = {row["id"] for row in rows}
    refused = {request.id for request in requests.values() if result(request.uuid) in bodies}
    missing = [what for what, request in accepted.items() if request.id not in recorded | refused]
    assert missing == []
    assert refused >= {requests[what].id for what in UNDECODABLE}
    assert await holds(channel, CALCULATION_RESULTS.name, 0)
    assert len(accepted) > len(ILLEGAL) / 2
