"""Faults of RabbitMQ itself: killed, out of memory, a queue full or unbound."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aio_pika import Message
from aio_pika.abc import AbstractIncomingMessage

from tests.faults.catalogue.fault import fault
from tests.faults.verdict.records import CREATED, Interval
from tests.faults.world import teams
from tests.faults.world.world import World
from tests.harness import queues
from tests.harness.waiting import until
from worker.rabbitmq import topology

_FULL = "harness.full"
_ALL_SETTLED_SECONDS = 30.0
_RECONNECTED_SECONDS = 10.0
_ON_THE_WAY_SECONDS = 0.1
_CONFIRM_SECONDS = 1.0
_SETTLED_SECONDS = 2.0  # a connection older than this has made its declarations


@fault("RabbitMQ killed", "broker", "broker links", repeats=True)
async def kill_broker(world: World) -> bool:
    await world.servers.broker.kill()
    await asyncio.sleep(world.some_seconds(1.0))
    is_down = not world.servers.broker.is_up
    await world.servers.broker.start()
    return is_down


@fault("memory alarm", "broker", repeats=True)
async def alarm_broker(world: World) -> bool:
    """RabbitMQ blocks the connections that publish."""
    await world.servers.broker.raise_memory_alarm()
    try:
        await asyncio.sleep(world.stall_seconds())
        return await _is_blocked(world.servers.broker_url)
    finally:
        await world.servers.broker.clear_memory_alarm()


async def _is_blocked(url: str) -> bool:
    """Whether RabbitMQ confirms nothing after the first message on a new connection."""
    async with queues.open_channel(url) as channel:
        try:
            async with asyncio.timeout(_CONFIRM_SECONDS):
                for _ in range(2):
                    await channel.default_exchange.publish(Message(b""), "harness.nowhere", mandatory=False)
        except TimeoutError:
            return True
    return False


@fault("messages returned", "broker", "broker links", repeats=True)
async def return_messages(world: World) -> bool:
    """No queue is bound to request.created, so mandatory messages are returned.

    A process declares the bindings when it connects and each minute after that, so new connections are
    refused meanwhile. The product's queue is bound twice, to its exchange and to the harness's switch; the
    switch takes the events from all other queues at once.
    """
    async with _no_new_connections(world), queues.open_channel(world.servers.broker_url) as channel:
        notifications = await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)
        switch = await channel.get_exchange(teams.SWITCH, ensure=False)
        await notifications.unbind(topology.REQUESTS, CREATED)
        await switch.unbind(topology.REQUESTS, CREATED)
        try:
            began = time.monotonic()
            await asyncio.sleep(world.some_seconds(2.5))
            return not any(
                each.type == CREATED and each.at > began + _ON_THE_WAY_SECONDS
                for each in world.record.arrivals[-100:]
            )
        finally:
            await switch.bind(topology.REQUESTS, CREATED)
            await notifications.bind(topology.REQUESTS, CREATED)


@fault("messages refused", "broker", "broker links", repeats=True)
async def refuse_messages(world: World) -> bool:
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
            is_full = await queues.holds(channel, _FULL, 1)
            if world.chance.random() < 0.5:  # Its team consumes again, before the queue is deleted.
                await full.consume(_drop, no_ack=True)
                await asyncio.sleep(world.some_seconds(1.0))
            return is_full
        finally:
            await full.delete(if_unused=False, if_empty=False)


async def _drop(_: AbstractIncomingMessage) -> None:
    """Ignore a message."""


@asynccontextmanager
async def _no_new_connections(world: World) -> AsyncIterator[None]:
    """Have every process connect again, then accept no connection: for a minute none declares bindings."""
    for link in world.broker_links:
        await link.cut()
    await until(
        lambda: all(
            link.open_connections and link.youngest_seconds >= _SETTLED_SECONDS for link in world.broker_links
        ),
        seconds=_RECONNECTED_SECONDS,
    )
    async with AsyncExitStack() as stack:
        for link in world.broker_links:
            link.stop_listening()
            stack.push_async_callback(link.start)
        await until(
            lambda: all(link.youngest_seconds >= _SETTLED_SECONDS for link in world.broker_links),
            seconds=_ALL_SETTLED_SECONDS,
        )
        yield
