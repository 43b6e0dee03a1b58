"""Access to the dead letters of a queue, by one operator at a time, without removing any."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import cast

import click
import msgspec
from aio_pika import IncomingMessage
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage, AbstractQueue
from aiormq.exceptions import ChannelLockedResource, ChannelNotFoundEntity
from yarl import URL

from service.settings import InvalidSetting, load
from worker.rabbitmq.connection import BROKER_ERRORS, BrokerUnavailable, open_connection
from worker.rabbitmq.topology import Queue
from worker.settings import AmqpUrl

ANSWER_SECONDS = 10.0  # for each answer of the broker
ARRIVAL_SECONDS = 2.0  # for the next of the messages that were counted
LOCK_SECONDS = 5.0  # for another command to end
_LOCK_POLL_SECONDS = 0.1
_LOCK = "calculation-requests.operator."  # prefix of an exclusive queue that serves as the lock

Wanted = Callable[[int, AbstractIncomingMessage], bool]  # given its position, from 1, and the message


class BrokerSettings(msgspec.Struct, frozen=True, rename="upper"):
    """The settings of commands that use RabbitMQ alone."""

    amqp_url: AmqpUrl


@asynccontextmanager
async def connected() -> AsyncIterator[AbstractConnection]:
    """Lend a connection to RabbitMQ. Declares nothing. Raises InvalidSetting and BrokerUnavailable."""
    try:
        url = URL(load(BrokerSettings).amqp_url).update_query(heartbeat=10, name="operator")
    except ValueError:
        raise InvalidSetting("AMQP_URL: not the address of a RabbitMQ server") from None
    try:
        async with open_connection(url, seconds=ANSWER_SECONDS) as connection:
            yield connection
    except BROKER_ERRORS as error:
        raise BrokerUnavailable from error


class DeadLetters:
    """The dead letters of a queue, locked for one command. Those not acknowledged stay, in the same order."""

    def __init__(self, channel: AbstractChannel, queue: AbstractQueue) -> None:
        self.channel = channel
        self.count = queue.declaration_result.message_count or 0
        self._queue = queue

    async def read(
        self, wanted: Wanted, *, limit: int | None = None, in_memory: int = 0
    ) -> AsyncIterator[tuple[int, AbstractIncomingMessage]]:
        """Yield the messages from the head, with their positions. Those not *wanted* are without their body.

        No more than *in_memory* are unacknowledged at a time; 0: as many as there are to be read.
        """
        arrived: asyncio.Queue[tuple[int, AbstractIncomingMessage]] = asyncio.Queue()
        number = 0

        async def take(message: AbstractIncomingMessage) -> None:
            nonlocal number
            number += 1
            if not wanted(number, message):
                cast("IncomingMessage", message).body = b""
            arrived.put_nowait((number, message))

        async with asyncio.timeout(ANSWER_SECONDS):
            await self.channel.set_qos(prefetch_count=in_memory or limit or 0)
            await self._queue.consume(take)
        for _ in range(self.count if limit is None else min(limit, self.count)):
            try:
                found = await asyncio.wait_for(arrived.get(), ARRIVAL_SECONDS)
            except TimeoutError:  # A message that another consumer holds never arrives.
                return
            yield found


@asynccontextmanager
async def opened(connection: AbstractConnection, queue: Queue) -> AsyncIterator[DeadLetters]:
    """Lend the dead letters of a queue.

    They are consumed, and returned by closing the channel: RabbitMQ 3.10 then keeps their order, but not that
    of rejected messages. Dead-letter queues have no delivery limit: reading a message must not lose it.
    """
    async with asyncio.timeout(ANSWER_SECONDS):
        channel = await _lock(connection, queue)
        try:
            letters = DeadLetters(channel, await channel.declare_queue(queue.dead_letters, passive=True))
        except ChannelNotFoundEntity:
            message = f"{queue.dead_letters}: no such queue. A worker declares it when it starts."
            raise click.ClickException(message) from None
    try:
        yield letters
    finally:
        with suppress(*BROKER_ERRORS):  # The end of the connection closes it too.
            async with asyncio.timeout(ANSWER_SECONDS):
                await channel.close()


async def _lock(connection: AbstractConnection, queue: Queue) -> AbstractChannel:
    """Return a channel once no other connection has the lock. RabbitMQ frees it shortly after they close."""
    for _ in range(int(LOCK_SECONDS / _LOCK_POLL_SECONDS)):
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        try:
            await channel.declare_queue(_LOCK + queue.name, exclusive=True)
        except ChannelLockedResource:
            await asyncio.sleep(_LOCK_POLL_SECONDS)
        else:
            return channel
    raise click.ClickException("Another command is reading these dead letters: try again when it has ended.")
