"""Access to the dead letters of a queue, by one operator at a time, without removing any."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import cast

import msgspec
from aio_pika import IncomingMessage
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage, AbstractQueue
from aiormq.exceptions import ChannelLockedResource, ChannelNotFoundEntity

from worker.operating.answers import OperatorError, printable
from worker.rabbitmq.connection import BROKER_ERRORS
from worker.rabbitmq.topology import CALCULATION_RESULTS, NOTIFICATIONS, Queue

QUEUES = {queue.name: queue for queue in (NOTIFICATIONS, CALCULATION_RESULTS)}
_LOCK_POLL_SECONDS = 0.1
_LOCK = "calculation-requests.operator."  # prefix of an exclusive queue that serves as the lock


class UnknownQueue(OperatorError):
    """There is no such queue."""


class QueueMissing(OperatorError):
    """The broker does not have this queue: a worker declares it when it starts."""


class DeadLettersInUse(OperatorError):
    """Another command is reading these dead letters: try again when it has ended."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a command waits, and how much it reads into memory."""

    answer_seconds: float = 10.0  # for each answer of the broker
    arrival_seconds: float = 2.0  # for the next of the messages that were counted
    lock_seconds: float = 5.0  # for another command to end
    largest_bytes: int = 64 * 2**20  # of all messages in memory; a single body may be larger


DEFAULT_LIMITS = Limits()


class Held(msgspec.Struct, frozen=True):
    """The first messages of a queue, unacknowledged, and how many it had in all."""

    channel: AbstractChannel
    count: int
    messages: list[AbstractIncomingMessage]


Wanted = Callable[[int, AbstractIncomingMessage], bool]  # given its position, and the message


def queue_named(name: str) -> Queue:
    """Return the queue with this name, or with dead letters of this name. Raises UnknownQueue."""
    queue = QUEUES.get(name.removesuffix(".dead-letters"))
    if queue is None:
        raise UnknownQueue(f"{printable(name)}: no such queue. Choose one of {', '.join(sorted(QUEUES))}.")
    return queue


@asynccontextmanager
async def held(
    connection: AbstractConnection,
    queue: Queue,
    *,
    limit: int,
    wanted: Wanted = lambda *_: True,
    limits: Limits = DEFAULT_LIMITS,
) -> AsyncIterator[Held]:
    """Lend the first dead letters of a queue. Those not acknowledged in the block return, in the same order.

    Only the *wanted* messages keep their bodies. When these exceed the limit in bytes, the rest is left out.

    The messages are consumed, and returned by closing the channel: RabbitMQ 3.10 then keeps their order, but
    not that of rejected messages. Dead-letter queues have no delivery limit: reading a message must not lose
    it. Raises QueueMissing and DeadLettersInUse.
    """
    arrivals = _Arrivals(wanted, limits)
    async with asyncio.timeout(limits.answer_seconds):
        channel, dead_letters = await _find(connection, queue, limits)
        await channel.set_qos(prefetch_count=limit)
        await dead_letters.consume(arrivals.take)
    count = dead_letters.declaration_result.message_count or 0
    messages = await arrivals.first(min(limit, count))
    try:
        yield Held(channel, count, messages)
    finally:
        with suppress(*BROKER_ERRORS):  # The end of the connection closes it too.
            async with asyncio.timeout(limits.answer_seconds):
                await channel.close()


class _Arrivals:
    """The messages of a consumer, in order and limited in bytes."""

    def __init__(self, wanted: Wanted, limits: Limits) -> None:
        self._wanted = wanted
        self._limits = limits
        self._messages: list[AbstractIncomingMessage] = []
        self._bytes = 0
        self._has_body = False
        self._is_full = False
        self._arrived = asyncio.Event()

    async def take(self, message: AbstractIncomingMessage) -> None:
        """Keep a message while there is room."""
        wanted = self._wanted(len(self._messages) + 1, message)
        size = len(repr(message.headers)) + (len(message.body) if wanted else 0)
        # The first body is kept whatever its size: otherwise it would block the others forever.
        is_first_body = wanted and not self._has_body
        if self._is_full or (self._bytes + size > self._limits.largest_bytes and not is_first_body):
            self._is_full = True
        else:
            if not wanted:
                cast("IncomingMessage", message).body = b""
            self._messages.append(message)
            self._bytes += size
            self._has_body |= wanted
        self._arrived.set()

    async def first(self, number: int) -> list[AbstractIncomingMessage]:
        """Return this many messages once they have arrived, fewer if they do not fit, and keep no more."""
        with suppress(TimeoutError):  # A message that another consumer holds never arrives.
            while len(self._messages) < number and not self._is_full:
                self._arrived.clear()
                await asyncio.wait_for(self._arrived.wait(), self._limits.arrival_seconds)
        self._is_full = True
        return self._messages


async def _find(
    connection: AbstractConnection, queue: Queue, limits: Limits
) -> tuple[AbstractChannel, AbstractQueue]:
    """Lock the dead letters of a queue. Returns their queue, and the channel to read it on."""
    channel = await _lock(connection, queue, limits)
    try:
        return channel, await channel.declare_queue(queue.dead_letters, passive=True)
    except ChannelNotFoundEntity:
        raise QueueMissing(f"{queue.dead_letters}: {QueueMissing.__doc__}") from None


async def _lock(connection: AbstractConnection, queue: Queue, limits: Limits) -> AbstractChannel:
    """Return a channel once no other connection has the lock. RabbitMQ frees it shortly after they close."""
    clock = asyncio.get_running_loop()
    deadline = clock.time() + limits.lock_seconds
    while True:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        try:
            await channel.declare_queue(_LOCK + queue.name, exclusive=True)
        except ChannelLockedResource:
            if clock.time() >= deadline:
                raise DeadLettersInUse from None
            await asyncio.sleep(_LOCK_POLL_SECONDS)
        else:
            return channel
