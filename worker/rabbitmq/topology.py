"""The exchanges, queues and bindings. Declaring them again changes nothing."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import msgspec
from aio_pika import ExchangeType
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import ChannelAccessRefused, ChannelClosed
from pamqp.common import FieldValue

from service.outbox import events
from service.outbox.events import CalculationCreated, RequestCreated
from worker import metrics

# `service` names these exchanges, because its AsyncAPI document describes them.
REQUESTS: Final = events.EXCHANGE
CALCULATIONS: Final = events.CALCULATIONS_EXCHANGE
NOTIFICATIONS_ALONE: Final = "calculation-requests.notifications"  # No other team may bind a queue to it.
DEAD_LETTERS: Final = "calculation-requests.dead-letters"

_DELIVERY_LIMIT = 20
_DEAD_LETTER_DAYS = 30  # So a dead letter may outlive an erased request by 30 days.


class Queue(msgspec.Struct, frozen=True):
    """A queue of this service, and the messages routed to it. *bypass* is a second exchange for them."""

    name: str
    exchange: str
    routing_key: str
    bypass: str | None = None

    @property
    def dead_letters(self) -> str:
        """The name of the dead-letter queue. The exchange DEAD_LETTERS uses it as the routing key."""
        return f"{self.name}.dead-letters"

    @property
    def arguments(self) -> dict[str, FieldValue]:
        """The arguments that the queue is declared with."""
        return {
            "x-queue-type": "quorum",
            "x-delivery-limit": _DELIVERY_LIMIT,
            "x-dead-letter-exchange": DEAD_LETTERS,
            "x-dead-letter-routing-key": self.dead_letters,
            # Without reject-publish, RabbitMQ would silently use at-most-once instead.
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }


NOTIFICATIONS: Final = Queue("notifications", REQUESTS, RequestCreated.type, bypass=NOTIFICATIONS_ALONE)
CALCULATION_RESULTS: Final = Queue("calculation-results", CALCULATIONS, CalculationCreated.type)
QUEUES: Final = (NOTIFICATIONS, CALCULATION_RESULTS)

EXCHANGES: Final = {
    REQUESTS: ExchangeType.TOPIC,
    CALCULATIONS: ExchangeType.TOPIC,
    NOTIFICATIONS_ALONE: ExchangeType.DIRECT,
    DEAD_LETTERS: ExchangeType.DIRECT,
}

# The TTL deletes personal data that other teams sent, and the external_id of an erased request.
#
# The delivery limit is huge, so that reading a dead letter never loses it. By default, RabbitMQ 4 drops a
# message after 20 redeliveries. RabbitMQ 3.10 does not support -1, which means no limit.
DEAD_LETTER_ARGUMENTS: Final[dict[str, FieldValue]] = {
    "x-queue-type": "quorum",
    "x-delivery-limit": 1_000_000_000,
    "x-message-ttl": _DEAD_LETTER_DAYS * 86_400_000,  # in milliseconds
    "x-overflow": "reject-publish",  # Otherwise a policy with `max-length` would silently drop dead letters.
}


async def may_create(connection: AbstractConnection) -> bool:
    """Whether this user may configure. If not, the broker logs an error, so ask once for each connection."""
    try:
        async with connection.channel() as channel:
            await _declare_exchange(channel, name=REQUESTS)
    except ChannelClosed as error:
        # If it is not refused, the exchange has other properties, which `ensure` returns.
        return not isinstance(error, ChannelAccessRefused)
    return True


async def ensure(connection: AbstractConnection, *, creates: bool = True) -> dict[str, str]:
    """Create missing exchanges and queues. Bind every queue. Each role does so, and any role can start first.

    Without *creates*, for users who may not configure, only check that the exchanges and queues exist. Those
    that the user has no rights to are left out: RabbitMQ 4 does not say whether they exist. Returns the
    broker's messages about differences, by name. A difference closes its channel, so each part has one.
    """
    differences = {}
    for name, declare_part in PARTS.items():
        try:
            async with connection.channel() as channel:
                await declare_part(channel, passive=not creates)
        except ChannelClosed as error:
            if creates or not isinstance(error, ChannelAccessRefused):
                differences[name] = str(error)
    return differences


async def _declare_exchange(channel: AbstractChannel, *, name: str, passive: bool = False) -> None:
    await channel.declare_exchange(name, EXCHANGES[name], durable=True, passive=passive)


async def _declare_queue(channel: AbstractChannel, *, queue: Queue, passive: bool = False) -> None:
    """Declare and bind a queue and its dead-letter queue. Export the number of dead letters."""
    dead_letters = await channel.declare_queue(
        queue.dead_letters, durable=True, arguments=DEAD_LETTER_ARGUMENTS, passive=passive
    )
    living = await channel.declare_queue(queue.name, durable=True, arguments=queue.arguments, passive=passive)
    if not passive:
        await dead_letters.bind(DEAD_LETTERS, queue.dead_letters)
        await living.bind(queue.exchange, queue.routing_key)
        if queue.bypass is not None:
            await living.bind(queue.bypass, queue.routing_key)
    # The metric may be too low, because RabbitMQ reports 0 messages while a queue has no leader.
    metrics.consumer_dead_letters.labels(queue.name).set(dead_letters.declaration_result.message_count or 0)


PARTS: Final[dict[str, Callable[..., Awaitable[None]]]] = {
    **{name: partial(_declare_exchange, name=name) for name in EXCHANGES},
    **{queue.name: partial(_declare_queue, queue=queue) for queue in QUEUES},
}
