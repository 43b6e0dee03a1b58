"""The harness's own queues, and how it reads them through every restart of the broker."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import aio_pika
from aio_pika import ExchangeType
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
from yarl import URL

from tests.faults.records import CALCULATED, CREATED, EMAIL_FAILED, EMAIL_SENT
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS

AUDITOR: Final = "harness.auditor"
TEAM: Final = "harness.calculation-team"
# request.created goes through an exchange of our own: one unbinding takes it from every queue at once.
SWITCH: Final = "harness.switch"

_QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}
_CONNECT_SECONDS = 2.0  # a broker that is starting may take a connection and then say nothing
_PAUSE_SECONDS = 0.05

Receive = Callable[[AbstractChannel, AbstractIncomingMessage], Awaitable[None]]


@asynccontextmanager
async def open_channel(url: str) -> AsyncIterator[AbstractChannel]:
    """Connect straight to the broker and lend a channel with publisher confirms."""
    async with asyncio.timeout(_CONNECT_SECONDS):
        connection: AbstractConnection = await aio_pika.connect(URL(url).update_query(heartbeat=5))
    try:
        yield await connection.channel(publisher_confirms=True, on_return_raises=True)
    finally:
        with suppress(*BROKER_ERRORS):
            async with asyncio.timeout(1.0):
                await connection.close()


async def declare(channel: AbstractChannel) -> None:
    """Declare the product's topology, and our queues beside it."""
    await topology.declare(channel)
    switch = await channel.declare_exchange(SWITCH, ExchangeType.FANOUT, durable=True)
    auditor = await channel.declare_queue(AUDITOR, durable=True, arguments=_QUORUM)
    team = await channel.declare_queue(TEAM, durable=True, arguments=_QUORUM)
    notifications = await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)
    for queue in (auditor, team, notifications):
        await queue.bind(switch)
    for event in (EMAIL_SENT, EMAIL_FAILED, CALCULATED):
        await auditor.bind(topology.REQUESTS, event)
    await switch.bind(topology.REQUESTS, CREATED)


async def count(channel: AbstractChannel, queue: str) -> int:
    """Return the number of messages that are ready in a queue."""
    declared = await channel.declare_queue(queue, passive=True)
    return declared.declaration_result.message_count or 0


class Reader:
    """Reads one queue on a connection of its own."""

    def __init__(self, url: str, queue: str, receive: Receive, *, prefetch: int) -> None:
        self._url = url
        self._queue = queue
        self._receive = receive
        self._prefetch = prefetch

    async def run(self) -> None:
        """Read until cancelled, connecting again whenever the connection is lost."""
        while True:
            with suppress(*BROKER_ERRORS):
                async with open_channel(self._url) as channel:
                    await self._read(channel)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _read(self, channel: AbstractChannel) -> None:
        lost = asyncio.Event()
        channel.close_callbacks.add(lambda *_: lost.set())

        async def receive(message: AbstractIncomingMessage) -> None:
            try:
                await self._receive(channel, message)
            except BROKER_ERRORS:
                lost.set()

        async with asyncio.timeout(_CONNECT_SECONDS):
            await channel.set_qos(prefetch_count=self._prefetch)
            queue = await channel.get_queue(self._queue, ensure=False)
            await queue.consume(receive)
        await lost.wait()
