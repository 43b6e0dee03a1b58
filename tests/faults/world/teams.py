"""The other teams: an auditor that records every event, and a team that makes one calculation for each."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import msgspec
from aio_pika import DeliveryMode, ExchangeType, Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from service.outbox.events import CalculationCreated, CloudEvent, RequestCreated
from tests.faults.verdict.records import CALCULATED, CREATED, EMAIL_FAILED, EMAIL_SENT, Arrival, Record
from tests.harness.queues import CONNECT_SECONDS, declare_topology, open_channel
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS

AUDITOR: Final = "harness.auditor"
TEAM: Final = "harness.calculation-team"
# request.created goes through an exchange of the harness: one unbinding takes it from every queue at once.
SWITCH: Final = "harness.switch"

_PREFETCH = 50
_PAUSE_SECONDS = 0.05
_PUBLISH_SECONDS = 30.0

Receive = Callable[[AbstractChannel, AbstractIncomingMessage], Awaitable[None]]


async def declare(channel: AbstractChannel) -> None:
    """Declare the product's topology, and the harness's queues."""
    await declare_topology(channel)
    switch = await channel.declare_exchange(SWITCH, ExchangeType.FANOUT, durable=True)
    quorum: dict[str, Any] = {"x-queue-type": "quorum"}
    auditor, team = [
        await channel.declare_queue(name, durable=True, arguments=quorum) for name in (AUDITOR, TEAM)
    ]
    for queue in (auditor, team, await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)):
        await queue.bind(switch)
    for event in (EMAIL_SENT, EMAIL_FAILED, CALCULATED):
        await auditor.bind(topology.REQUESTS, event)
    await switch.bind(topology.REQUESTS, CREATED)


async def audit(url: str, record: Record) -> None:
    """Record every event, when it came and in which order, before acknowledging it. Until cancelled."""

    async def receive(_: AbstractChannel, message: AbstractIncomingMessage) -> None:
        event = msgspec.json.decode(message.body, type=CloudEvent[dict[str, Any]])
        assert event.id == message.message_id
        key, sequence = event.data["external_id"], event.data["sequence"]
        redelivered = bool(message.redelivered)
        record.arrivals.append(Arrival(event.id, key, event.type, sequence, time.monotonic(), redelivered))

    await _read(url, AUDITOR, receive)


async def calculate(url: str) -> None:
    """Answer each request.created with calculation.created, at least once. Until cancelled."""

    async def receive(channel: AbstractChannel, message: AbstractIncomingMessage) -> None:
        uuid = msgspec.json.decode(message.body, type=CloudEvent[RequestCreated]).data.uuid
        exchange = await channel.get_exchange(topology.CALCULATIONS, ensure=False)
        body = msgspec.json.encode(CalculationCreated(uuid, calculation_of(uuid)))
        answer = Message(body, delivery_mode=DeliveryMode.PERSISTENT, message_id=calculation_of(uuid))
        async with asyncio.timeout(_PUBLISH_SECONDS):
            await exchange.publish(answer, topology.CALCULATION_RESULTS.routing_key, mandatory=True)

    await _read(url, TEAM, receive)


def calculation_of(uuid: str) -> str:
    return f"calculation-of-{uuid}"


async def _read(url: str, queue: str, receive: Receive) -> None:
    """Read a queue on its own connection; connect again whenever it is lost."""
    while True:
        with suppress(*BROKER_ERRORS):
            async with open_channel(url) as channel:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await channel.set_qos(prefetch_count=_PREFETCH)
                    messages = (await channel.get_queue(queue, ensure=False)).iterator()
                    await messages.consume()
                async for message in messages:
                    await receive(channel, message)
                    await message.ack()
        await asyncio.sleep(_PAUSE_SECONDS)
