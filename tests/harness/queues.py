"""A channel to the broker, its topology, its queues, and what its users may do."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import aio_pika
from aio_pika import Message
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS

CONNECT_SECONDS: Final = 2.0  # A broker that is starting may accept a connection and then not answer.


@asynccontextmanager
async def open_channel(url: str) -> AsyncIterator[AbstractChannel]:
    """Connect to the broker without a proxy, and yield a channel with publisher confirms."""
    async with asyncio.timeout(CONNECT_SECONDS):
        connection: AbstractConnection = await aio_pika.connect(URL(url).update_query(heartbeat=5))
    try:
        yield await connection.channel(publisher_confirms=True, on_return_raises=True)
    finally:
        with suppress(*BROKER_ERRORS):
            async with asyncio.timeout(1.0):
                await connection.close()


async def declare_topology(channel: AbstractChannel) -> None:
    """Create what is missing. The broker closes *channel* at the first part that has other properties."""
    for declare_part in topology.PARTS.values():
        await declare_part(channel)


async def count(channel: AbstractChannel, queue: str) -> int:
    declared = await channel.declare_queue(queue, passive=True)
    return declared.declaration_result.message_count or 0


async def holds(channel: AbstractChannel, queue: str, number: int) -> bool:
    return await count(channel, queue) == number


async def read(channel: AbstractChannel, queue: str) -> None:
    await (await channel.get_queue(queue)).get(fail=False)


async def write(
    channel: AbstractChannel,
    exchange: str,
    routing_key: str = "nothing",
    body: bytes = b"{}",
    *,
    mandatory: bool = False,
) -> None:
    """Publish a message, which need not reach a queue unless it is *mandatory*."""
    await (await channel.get_exchange(exchange)).publish(Message(body), routing_key, mandatory=mandatory)


async def is_refused(url: str, attempt: Callable[[AbstractChannel], Awaitable[Any]]) -> bool:
    """Whether the broker refuses the user of *url* what *attempt* does."""
    async with open_channel(url) as channel, asyncio.timeout(10):
        try:
            await attempt(channel)
        except ChannelAccessRefused:
            return True
    return False
