"""A channel to the broker, its topology, and the lengths of its queues."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection
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
