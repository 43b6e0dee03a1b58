"""The exchanges, queues and bindings. Declaring them again changes nothing."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import msgspec
from aio_pika import ExchangeType
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import ChannelAccessRefused, ChannelClosed
from pamqp.common import FieldValue

from service.outbox import events
from service.outbox.events import CalculationCreated, RequestCreated

REQUESTS: Final = events.EXCHANGE
CALCULATIONS: Final = events.CALCULATIONS_EXCHANGE
DEAD_LETTERS: Final = "calculation-requests.dead-letters"

DELIVERY_LIMIT = 20
_NO_DELIVERY_LIMIT = 1_000_000_000
_DEAD_LETTER_DAYS = 30  # also how long dead letters may outlive the request that they are about


class Queue(msgspec.Struct, frozen=True):
    """A queue of this service, and the messages routed to it."""

    name: str
    exchange: str
    routing_key: str

    @property
    def dead_letters(self) -> str:
        """The queue for messages that could not be handled; also its routing key in DEAD_LETTERS."""
        return f"{self.name}.dead-letters"

    @property
    def arguments(self) -> dict[str, FieldValue]:
        """The arguments that the queue is declared with."""
        return {
            "x-queue-type": "quorum",
            "x-delivery-limit": DELIVERY_LIMIT,
            "x-dead-letter-exchange": DEAD_LETTERS,
            "x-dead-letter-routing-key": self.dead_letters,
            # Needs reject-publish: without it RabbitMQ silently falls back to at-most-once.
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }


NOTIFICATIONS: Final = Queue(events.NOTIFICATIONS_QUEUE, REQUESTS, RequestCreated.type)
CALCULATION_RESULTS: Final = Queue(events.CALCULATION_RESULTS_QUEUE, CALCULATIONS, CalculationCreated.type)
QUEUES: Final = (NOTIFICATIONS, CALCULATION_RESULTS)

EXCHANGES: Final = {
    REQUESTS: ExchangeType.TOPIC,
    CALCULATIONS: ExchangeType.TOPIC,
    DEAD_LETTERS: ExchangeType.DIRECT,
}

# The personal data of other teams ends with the message, and so does the external_id of an erased request.
#
# Looking at a dead letter must not lose it: by default RabbitMQ 4 drops a message at its twentieth delivery.
# RabbitMQ 3.10 does not know the value -1, for no limit.
DEAD_LETTER_ARGUMENTS: Final[dict[str, FieldValue]] = {
    "x-queue-type": "quorum",
    "x-delivery-limit": _NO_DELIVERY_LIMIT,
    "x-message-ttl": _DEAD_LETTER_DAYS * 86_400_000,  # in milliseconds
}


class Topology(NamedTuple):
    """What is declared: how many dead letters each queue has, and what exists with other properties."""

    dead_letters: dict[str, int]  # those ready; RabbitMQ answers 0 while a queue has no leader
    differences: dict[str, str]  # by name of the exchange or queue, in the broker's words


async def ensure(connection: AbstractConnection) -> Topology:
    """Create what is missing and bind every queue. Every role does so, so that any can start first.

    Each part is declared on a channel of its own, so that one difference does not stop the others.
    """
    found = Topology({}, {})
    for name, declare_part in PARTS.items():
        try:
            found.dead_letters[name] = await _declare(connection, declare_part)
        except ChannelClosed as error:
            found.differences[name] = str(error)
    return found


async def _declare(connection: AbstractConnection, declare_part: "_DeclarePart") -> int:
    """Declare a part, or find it: if the user may not declare it, all but its presence is up to others."""
    try:
        async with connection.channel() as channel:
            return await declare_part(channel)
    except ChannelAccessRefused as refusal:
        try:
            async with connection.channel() as channel:
                return await declare_part(channel, passive=True)
        except ChannelClosed:
            raise refusal from None


async def _declare_exchange(channel: AbstractChannel, *, name: str, passive: bool = False) -> int:
    await channel.declare_exchange(name, EXCHANGES[name], durable=True, passive=passive)
    return 0


async def _declare_queue(channel: AbstractChannel, *, queue: Queue, passive: bool = False) -> int:
    """Declare a queue and its dead letters, and bind both. Returns the number of dead letters."""
    dead_letters = await channel.declare_queue(
        queue.dead_letters, durable=True, arguments=DEAD_LETTER_ARGUMENTS, passive=passive
    )
    living = await channel.declare_queue(queue.name, durable=True, arguments=queue.arguments, passive=passive)
    if not passive:
        await dead_letters.bind(DEAD_LETTERS, queue.dead_letters)
        await living.bind(queue.exchange, queue.routing_key)
    return dead_letters.declaration_result.message_count or 0


_DeclarePart: TypeAlias = Callable[..., Awaitable[int]]
PARTS: Final[dict[str, _DeclarePart]] = {
    **{name: partial(_declare_exchange, name=name) for name in EXCHANGES},
    **{queue.name: partial(_declare_queue, queue=queue) for queue in QUEUES},
}
