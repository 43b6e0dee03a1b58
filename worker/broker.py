"""Connections to RabbitMQ, and one name for every way it can be away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import AMQPError, ChannelInvalidStateError
from yarl import URL

from worker import metrics, topology
from worker.settings import WorkerSettings

# What aio-pika raises when the broker, its network or the time allowed is at fault.
BROKER_ERRORS = (AMQPError, ChannelInvalidStateError, OSError, TimeoutError)

CLOSE_SECONDS = 2.0  # for the broker to hear that we go


class BrokerUnavailable(Exception):
    """RabbitMQ cannot be reached, or did not answer in time."""


@asynccontextmanager
async def open_channel(settings: WorkerSettings, *, name: str) -> AsyncIterator[AbstractChannel]:
    """Connect, declare the topology, and lend a channel with publisher confirms.

    The connection is not a robust one: who uses it leaves the block when anything goes wrong, and opens
    another. Raises BrokerUnavailable when it cannot be opened.
    """
    metrics.broker_connected.labels(name)  # 0 until it is open
    url = URL(settings.amqp_url).update_query(heartbeat=settings.broker_heartbeat_seconds, name=name)
    async with open_connection(url, seconds=settings.broker_timeout_seconds) as connection:
        with metrics.holding(metrics.broker_connected.labels(name), 1):
            yield await _prepare(connection, settings)


@asynccontextmanager
async def open_connection(url: URL, *, seconds: float) -> AsyncIterator[AbstractConnection]:
    """Lend a connection that is made within *seconds*, and closed in time. Raises BrokerUnavailable."""
    try:
        async with asyncio.timeout(seconds):
            connection = await aio_pika.connect(url)
    except BROKER_ERRORS as error:
        raise BrokerUnavailable from error
    try:
        yield connection
    finally:
        with suppress(*BROKER_ERRORS):
            async with asyncio.timeout(CLOSE_SECONDS):
                await connection.close()


async def _prepare(connection: AbstractConnection, settings: WorkerSettings) -> AbstractChannel:
    try:
        async with asyncio.timeout(settings.broker_timeout_seconds):
            channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            await topology.declare(channel)
    except BROKER_ERRORS as error:
        raise BrokerUnavailable from error
    return channel
