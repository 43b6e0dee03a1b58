"""The harness's own queues, and a reader that survives every restart of the broker."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from aio_pika import ExchangeType
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from tests.faults.verdict.records import CALCULATED, CREATED, EMAIL_FAILED, EMAIL_SENT
from tests.harness.queues import CONNECT_SECONDS, declare_topology, open_channel
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS

AUDITOR: Final = "harness.auditor"
TEAM: Final = "harness.calculation-team"
# request.created goes through an exchange of the harness: one unbinding takes it from every queue at once.
SWITCH: Final = "harness.switch"

_QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}
_PAUSE_SECONDS = 0.05

Receive = Callable[[AbstractChannel, AbstractIncomingMessage], Awaitable[None]]


async def declare(channel: AbstractChannel) -> None:
    """Declare the product's topology, and the harness's queues."""
    await declare_topology(channel)
    switch = await channel.declare_exchange(SWITCH, ExchangeType.FANOUT, durable=True)
    auditor = await channel.declare_queue(AUDITOR, durable=True, arguments=_QUORUM)
    team = await channel.declare_queue(TEAM, durable=True, arguments=_QUORUM)
    notifications = await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)
    for queue in (auditor, team, notifications):
        await queue.bind(switch)
    for event in (EMAIL_SENT, EMAIL_FAILED, CALCULATED):
        await auditor.bind(topology.REQUESTS, event)
    await switch.bind(topology.REQUESTS, CREATED)


class Reader:
    """Reads one queue, on its own connection."""

    def __init__(self, url: str, queue: str, receive: Receive, *, prefetch: int) -> None:
        self._url = url
        self._queue = queue
        self._receive = receive
        self._prefetch = prefetch

    async def run(self) -> None:
        """Read until cancelled; reconnect whenever the connection is lost."""
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

        async with asyncio.timeout(CONNECT_SECONDS):
            await channel.set_qos(prefetch_count=self._prefetch)
            queue = await channel.get_queue(self._queue, ensure=False)
            await queue.consume(receive)
        await lost.wait()
