"""The broker's queues, topology and users' rights; and messages as no client of ours would write them."""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import aio_pika
from aio_pika import Message
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import ChannelAccessRefused
from pamqp.commands import Basic
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


_SHORT = b"\x01\xe9"  # one byte of Latin-1


def _table(fields: bytes) -> bytes:
    return struct.pack(">I", len(fields)) + fields


_nested = b""
for _ in range(2_000):
    _nested = b"\x01nF" + _table(_nested)

# By what they are: the property, and its bytes.
UNDECODABLE = {
    **{f"{name} in Latin-1": (name, _SHORT) for name in ("content_type", "message_id", "app_id", "reply_to")},
    "type in Latin-1": ("message_type", _SHORT),
    "microseconds": ("timestamp", struct.pack(">Q", 1_700_000_000_000_000)),
    "nanoseconds": ("timestamp", struct.pack(">Q", 1_700_000_000_000_000_000)),
    "header's name in Latin-1": ("headers", _table(_SHORT + b"V")),
    "header beyond the year 9999": ("headers", _table(b"\x01tT" + struct.pack(">Q", 2**63 - 1))),
    "headers nested 2,000 deep": ("headers", _table(_nested)),
    "header of text in Latin-1": ("headers", _table(b"\x01aS" + struct.pack(">I", 1) + b"\xe9")),
    "header of 1e300": ("headers", _table(b"\x01ad" + struct.pack(">d", 1e300))),
    # With names of their own, because RabbitMQ 4 keeps one header of each name.
    "headers of 100 KB": ("headers", _table(b"".join(b"\x06%06dV" % number for number in range(12_500)))),
}


class NotText(str):
    __slots__ = ()

    def encode(self, encoding: str = "", errors: str = "strict") -> bytes:  # noqa: ARG002 - pamqp passes one
        """Return the text in Latin-1, whatever *encoding* is asked for."""
        return super().encode("latin-1", errors)


class RawMessage(Message):
    """A message with one property that is written as these bytes, and a message_id if one is given."""

    def __init__(self, body: bytes, name: str, written: bytes, *, message_id: str = "") -> None:
        super().__init__(body)
        parts = {"message_id": bytes([len(message_id)]) + message_id.encode()} if message_id else {}
        parts[name] = written
        flags = sum(Basic.Properties.flags[each] for each in parts)
        in_order = [parts[each] for each in Basic.Properties.attributes() if each in parts]
        object.__setattr__(self, "raw", struct.pack(">H", flags) + b"".join(in_order))

    @property
    def properties(self) -> Basic.Properties:
        return _Written(object.__getattribute__(self, "raw"))


class _Written(Basic.Properties):
    def __init__(self, written: bytes) -> None:
        super().__init__()
        self.written = written

    def marshal(self) -> bytes:
        return self.written
