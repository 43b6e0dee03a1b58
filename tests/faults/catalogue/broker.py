"""Faults of RabbitMQ itself: killed, out of memory, a queue full."""

import asyncio
import time

from aio_pika.abc import AbstractIncomingMessage

from tests.faults.catalogue.fault import fault
from tests.faults.verdict.records import Interval
from tests.faults.world.world import World
from tests.harness import queues
from worker.rabbitmq import topology

_FULL = "harness.full"


@fault("RabbitMQ killed", "broker", "broker links", repeats=True)
async def kill_broker(world: World) -> None:
    await world.servers.broker.kill()
    await asyncio.sleep(world.some_seconds(1.0))
    await world.servers.broker.start()


@fault("memory alarm", "broker", repeats=True)
async def alarm_broker(world: World) -> None:
    """RabbitMQ blocks the connections that publish."""
    await world.servers.broker.raise_memory_alarm()
    try:
        await asyncio.sleep(world.stall_seconds())
    finally:
        await world.servers.broker.clear_memory_alarm()


@fault("messages refused", "broker", "broker links", repeats=True)
async def refuse_messages(world: World) -> None:
    """Another team's full queue refuses every event, while all other queues accept it."""
    async with queues.open_channel(world.servers.broker_url) as channel:
        full = await channel.declare_queue(
            _FULL, durable=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
        )
        try:
            await full.bind(topology.REQUESTS, "request.*")
            began = time.monotonic()
            await asyncio.sleep(world.chance.uniform(1.0, world.longest_stall_seconds + 4.0))
            world.record.refusals.append(Interval(began, time.monotonic()))
            if world.chance.random() < 0.5:  # Its team consumes again, before the queue is deleted.
                await full.consume(_drop, no_ack=True)
                await asyncio.sleep(world.some_seconds(1.0))
        finally:
            await full.delete(if_unused=False, if_empty=False)


async def _drop(_: AbstractIncomingMessage) -> None:
    """Ignore a message."""
