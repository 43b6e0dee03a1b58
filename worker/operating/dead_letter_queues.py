"""Dead letters: looked at where they lie, or moved back to their queue."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import cast

import msgspec
from aio_pika import IncomingMessage, Message
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage, AbstractQueue
from aiormq.exceptions import ChannelLockedResource, ChannelNotFoundEntity, DeliveryError
from yarl import URL

from service.settings import InvalidSetting
from worker.operating.tables import printable
from worker.rabbitmq.connection import BROKER_ERRORS, BrokerUnavailable, open_connection
from worker.rabbitmq.copies import copy_of
from worker.rabbitmq.topology import CALCULATION_RESULTS, NOTIFICATIONS, Queue

QUEUES = {queue.name: queue for queue in (NOTIFICATIONS, CALCULATION_RESULTS)}

_ANSWER_SECONDS = 10.0  # for the broker's answer to any one thing
_ARRIVAL_SECONDS = 2.0  # for the next of the messages that were counted
_LARGEST_BYTES = 64 * 2**20  # of the messages in memory; the body of one may be larger
_LOCK_SECONDS = 5.0  # for the end of another command
_LOCK_LOOK_SECONDS = 0.1
_LOCK = "calculation-requests.operator."  # of an exclusive queue: one operator at a time

# Headers that say how a message died. They are written anew if it dies again.
_OF_DEATH = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count", "x-reason")
_REDRIVEN = "x-redriven"


class UnknownQueue(Exception):
    """There is no such queue of ours."""


class QueueMissing(Exception):
    """The broker does not have this queue: no worker has run on it."""


class DeadLettersInUse(Exception):
    """Another command is reading these dead letters: try again when it has ended."""


class LetterNotFound(Exception):
    """There is no such message among those looked at."""


class LiveQueueRefuses(Exception):
    """The live queue is missing or full: what was not moved is still among the dead letters."""


class Death(msgspec.Struct, frozen=True):
    """An entry of the header x-death: why the broker moved the message, from where, how often."""

    queue: str
    reason: str
    count: int
    time: datetime | None


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A message among the dead letters, without its body: other teams' may hold personal data."""

    position: int  # 1 is the next to be redriven
    message_id: str | None
    type: str | None
    reason: str | None
    reason_text: str | None
    redriven: int
    deaths: list[Death]


class Opened(msgspec.Struct, frozen=True):
    """A dead letter with its headers and body."""

    letter: DeadLetter
    headers: dict[str, str]
    body: str


class Listing(msgspec.Struct, frozen=True):
    """The first dead letters of a queue, and how many there are in all."""

    queue: str
    count: int
    letters: list[DeadLetter]


class Redriven(msgspec.Struct, frozen=True):
    """What was moved back, what was asked for and not found, and how many are left."""

    queue: str
    moved: list[str | None]
    not_found: list[str]
    left: int


class Held(msgspec.Struct, frozen=True):
    """The first messages of a queue, unsettled, and how many it had in all."""

    channel: AbstractChannel
    count: int
    messages: list[AbstractIncomingMessage]


Wanted = Callable[[int, AbstractIncomingMessage], bool]  # of its position, and the message


def queue_named(name: str) -> Queue:
    """Return the queue of this name, or whose dead letters have it. Raises UnknownQueue."""
    queue = QUEUES.get(name.removesuffix(".dead-letters"))
    if queue is None:
        raise UnknownQueue(f"{printable(name)}: no such queue; there are {', '.join(sorted(QUEUES))}")
    return queue


@asynccontextmanager
async def connect(amqp_url: str) -> AsyncIterator[AbstractConnection]:
    """Lend a connection to RabbitMQ; nothing is declared on it. Raises BrokerUnavailable."""
    try:
        url = URL(amqp_url).update_query(heartbeat=10, name="operator")
    except ValueError:
        raise InvalidSetting("AMQP_URL: not the address of a RabbitMQ") from None
    try:
        async with open_connection(url, seconds=_ANSWER_SECONDS) as connection:
            yield connection
    except BROKER_ERRORS as error:
        raise BrokerUnavailable from error


@asynccontextmanager
async def held(
    connection: AbstractConnection, queue: Queue, *, limit: int, wanted: Wanted = lambda *_: True
) -> AsyncIterator[Held]:
    """Lend the first dead letters of a queue; what is not settled within goes back, in the same order.

    Only those *wanted* have their bodies. When their bytes are too many, the later ones are left out.

    They are consumed, not got one by one, and go back by the closing of the channel: RabbitMQ 3.10 returns
    what one consumer held in order, and rejected messages in any. Raises QueueMissing and DeadLettersInUse.
    """
    arrivals = _Arrivals(wanted)
    async with asyncio.timeout(_ANSWER_SECONDS):
        channel, dead_letters = await _find(connection, queue)
        await channel.set_qos(prefetch_count=limit)
        await dead_letters.consume(arrivals.take)
    count = dead_letters.declaration_result.message_count or 0
    messages = await arrivals.first(min(limit, count))
    try:
        yield Held(channel, count, messages)
    finally:
        with suppress(*BROKER_ERRORS):  # The end of the connection closes it too.
            async with asyncio.timeout(_ANSWER_SECONDS):
                await channel.close()


class _Arrivals:
    """The messages of a consumer in their order, with a bound in bytes."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._messages: list[AbstractIncomingMessage] = []
        self._bytes = 0
        self._has_body = False
        self._is_full = False
        self._arrived = asyncio.Event()

    async def take(self, message: AbstractIncomingMessage) -> None:
        """Keep a message while there is room."""
        wanted = self._wanted(len(self._messages) + 1, message)
        size = len(repr(message.headers)) + (len(message.body) if wanted else 0)
        is_first_body = wanted and not self._has_body  # However large, it must not block the others for ever.
        if self._is_full or (self._bytes + size > _LARGEST_BYTES and not is_first_body):
            self._is_full = True
        else:
            if not wanted:
                cast("IncomingMessage", message).body = b""
            self._messages.append(message)
            self._bytes += size
            self._has_body |= wanted
        self._arrived.set()

    async def first(self, number: int) -> list[AbstractIncomingMessage]:
        """Return so many messages once they have come, or as many as fit, and keep no more."""
        with suppress(TimeoutError):  # A message that another consumer has taken never arrives.
            while len(self._messages) < number and not self._is_full:
                self._arrived.clear()
                await asyncio.wait_for(self._arrived.wait(), _ARRIVAL_SECONDS)
        self._is_full = True
        return self._messages


async def _find(connection: AbstractConnection, queue: Queue) -> tuple[AbstractChannel, AbstractQueue]:
    """Return the queue of the dead letters, for this connection alone, and a channel to read it on."""
    channel = await _lock(connection, queue)
    try:
        return channel, await channel.declare_queue(queue.dead_letters, passive=True)
    except ChannelNotFoundEntity:
        raise QueueMissing(f"{queue.dead_letters}: {QueueMissing.__doc__}") from None


async def _lock(connection: AbstractConnection, queue: Queue) -> AbstractChannel:
    """Return a channel once no other connection has the lock; RabbitMQ frees one a moment after its end."""
    clock = asyncio.get_running_loop()
    deadline = clock.time() + _LOCK_SECONDS
    while True:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        try:
            await channel.declare_queue(_LOCK + queue.name, exclusive=True)
        except ChannelLockedResource:
            if clock.time() >= deadline:
                raise DeadLettersInUse from None
            await asyncio.sleep(_LOCK_LOOK_SECONDS)
        else:
            return channel


async def list_letters(connection: AbstractConnection, queue: Queue, *, limit: int) -> Listing:
    """Return the first dead letters of a queue, without bodies."""
    async with held(connection, queue, limit=limit, wanted=lambda *_: False) as letters:
        described = [_describe(message, number) for number, message in enumerate(letters.messages, 1)]
    return Listing(queue.dead_letters, letters.count, described)


async def show_letter(
    connection: AbstractConnection, queue: Queue, *, message_id: str | None, position: int | None, limit: int
) -> Opened:
    """Return one dead letter with its headers and body. Raises LetterNotFound."""

    def is_it(number: int, message: AbstractIncomingMessage) -> bool:
        return number == position or (message_id is not None and message.message_id == message_id)

    async with held(connection, queue, limit=limit, wanted=is_it) as letters:
        for number, message in enumerate(letters.messages, 1):
            if is_it(number, message):
                headers = {name: str(value) for name, value in message.headers.items()}
                body = message.body.decode(errors="backslashreplace")
                return Opened(_describe(message, number), headers, body)
    raise LetterNotFound(f"no such message among the first {len(letters.messages)} of {queue.dead_letters}")


async def redrive(
    connection: AbstractConnection, queue: Queue, *, message_ids: Collection[str], limit: int
) -> Redriven:
    """Move dead letters back to their queue, in order: all of the first *limit*, or those with these ids.

    Fewer when they are large: what is left over is for the next redrive.

    Each is published and confirmed before it is taken out: a crash in between leaves it in both places, and
    consumers bear a repeat. Raises LiveQueueRefuses.
    """
    moved: list[str | None] = []

    def is_chosen(_: int, message: AbstractIncomingMessage) -> bool:
        return not message_ids or message.message_id in message_ids

    async with held(connection, queue, limit=limit, wanted=is_chosen) as letters:
        for position, message in enumerate(letters.messages, 1):
            if is_chosen(position, message):
                await _move_back(letters.channel, queue, message, moved)
                moved.append(message.message_id)
    return Redriven(queue.name, moved, sorted(set(message_ids).difference(moved)), letters.count - len(moved))


async def _move_back(
    channel: AbstractChannel, queue: Queue, message: AbstractIncomingMessage, moved: Sequence[str | None]
) -> None:
    async with asyncio.timeout(_ANSWER_SECONDS):
        try:
            await channel.default_exchange.publish(_copy(message), queue.name, mandatory=True)
        except DeliveryError:
            raise LiveQueueRefuses(f"{queue.name}: {LiveQueueRefuses.__doc__} Moved: {len(moved)}.") from None
        await message.ack()


def _copy(message: AbstractIncomingMessage) -> Message:
    """Return the message as it was before it died, but for the number of its redrives."""
    headers = {name: value for name, value in message.headers.items() if not name.startswith(_OF_DEATH)}
    return copy_of(message, {**headers, _REDRIVEN: _redriven(message) + 1})


def _describe(message: AbstractIncomingMessage, position: int) -> DeadLetter:
    deaths = _deaths(message)
    reason = message.headers.get("x-reason")
    text = message.headers.get("x-reason-text")
    return DeadLetter(
        position=position,
        message_id=message.message_id,
        type=message.type,
        reason=str(reason) if reason is not None else next((death.reason for death in deaths), None),
        reason_text=str(text) if text else None,
        redriven=_redriven(message),
        deaths=deaths,
    )


def _deaths(message: AbstractIncomingMessage) -> list[Death]:
    """Return what the header x-death says; senders may put anything there."""
    entries = message.headers.get("x-death")
    return (
        [_death(entry) for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    )


def _death(entry: Mapping[str, object]) -> Death:
    count, time = entry.get("count"), entry.get("time")
    return Death(
        queue=str(entry.get("queue")),
        reason=str(entry.get("reason")),
        count=count if isinstance(count, int) else 0,
        time=time if isinstance(time, datetime) else None,
    )


def _redriven(message: AbstractIncomingMessage) -> int:
    times = message.headers.get(_REDRIVEN)
    return times if isinstance(times, int) else 0
