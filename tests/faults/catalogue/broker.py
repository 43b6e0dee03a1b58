"""Faults of RabbitMQ itself: killed, out of memory, a queue full or unbound."""

import asyncio

from tests.faults.catalogue.fault import fault
from tests.faults.verdict.records import CREATED
from tests.faults.world import teams
from tests.faults.world.world import World
from tests.harness import queues
from worker.rabbitmq import topology

_FULL = "harness.full"


@fault("RabbitMQ killed", "broker", "broker links", repeats=True)
async def kill_broker(world: World) -> None:
    """SIGKILL to RabbitMQ, and a start."""
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


@fault("messages returned", "broker", "broker links", repeats=True)
async def return_messages(world: World) -> None:
    """No queue is bound to request.created, so mandatory messages are returned.

    The product's queue is bound twice, to its exchange and to the harness's switch; the switch takes the
    events from all other queues at once. A process restores its binding each minute, which ends the fault.
    """
    async with queues.open_channel(world.servers.broker.url) as channel:
        notifications = await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)
        switch = await channel.get_exchange(teams.SWITCH, ensure=False)
        await notifications.unbind(topology.REQUESTS, CREATED)
        await switch.unbind(topology.REQUESTS, CREATED)
        try:
            await asyncio.sleep(world.some_seconds(2.5))
        finally:
            await switch.bind(topology.REQUESTS, CREATED)
            await notifications.bind(topology.REQUESTS, CREATED)


@fault("messages refused", "broker", "broker links", repeats=True)
async def refuse_messages(world: World) -> None:
    """Another team's full queue refuses every event, while all other queues accept it."""
    async with queues.open_channel(world.servers.broker.url) as channel:
        full = await channel.declare_queue(
            _FULL, durable=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
        )
        try:
            await full.bind(topology.REQUESTS, "request.*")
            await asyncio.sleep(world.chance.uniform(1.0, world.longest_stall_seconds + 4.0))
        finally:
            await full.delete(if_unused=False, if_empty=False)
