"""A calculation team: answers each request.created with calculation.created, at least once."""

import asyncio

import msgspec
from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from service.outbox.events import CalculationCreated, CloudEvent, RequestCreated
from tests.faults.world.own_queues import TEAM, Reader
from worker.rabbitmq import topology

_PUBLISH_SECONDS = 30.0


def calculation_of(uuid: str) -> str:
    """Return the id of the team's calculation for a request."""
    return f"calculation-of-{uuid}"


def team(url: str) -> Reader:
    """Return a reader that makes one calculation for each request."""
    return Reader(url, TEAM, _calculate, prefetch=50)


async def _calculate(channel: AbstractChannel, message: AbstractIncomingMessage) -> None:
    uuid = msgspec.json.decode(message.body, type=CloudEvent[RequestCreated]).data.uuid
    exchange = await channel.get_exchange(topology.CALCULATIONS, ensure=False)
    answer = Message(
        msgspec.json.encode(CalculationCreated(uuid, calculation_of(uuid))),
        content_type="application/json",
        delivery_mode=DeliveryMode.PERSISTENT,
        message_id=calculation_of(uuid),
    )
    async with asyncio.timeout(_PUBLISH_SECONDS):
        await exchange.publish(answer, topology.CALCULATION_RESULTS.routing_key, mandatory=True)
    await message.ack()
