"""Exchanges, queues and bindings, in one place. Declaring them again changes nothing."""

from typing import Final

import msgspec
from aio_pika import ExchangeType
from aio_pika.abc import AbstractChannel
from pamqp.common import FieldValue

from service import events
from service.events import CalculationCreated, RequestCreated

REQUESTS: Final = events.EXCHANGE
CALCULATIONS: Final = events.CALCULATIONS_EXCHANGE
DEAD_LETTERS: Final = "calculation-requests.dead-letters"

DELIVERY_LIMIT = 20
_NO_DELIVERY_LIMIT = 1_000_000_000


class Queue(msgspec.Struct, frozen=True):
    """A queue of ours, and what is routed to it."""

    name: str
    exchange: str
    routing_key: str

    @property
    def dead_letters(self) -> str:
        """The queue for what could not be handled; also its routing key in the exchange of dead letters."""
        return f"{self.name}.dead-letters"

    @property
    def arguments(self) -> dict[str, FieldValue]:
        """What the queue is declared with."""
        return {
            "x-queue-type": "quorum",
            "x-delivery-limit": DELIVERY_LIMIT,
            "x-dead-letter-exchange": DEAD_LETTERS,
            "x-dead-letter-routing-key": self.dead_letters,
            # At-least-once holds only together with reject-publish: else RabbitMQ falls back silently.
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

# RabbitMQ 4 would drop what has been looked at twenty times. The number -1, for none, is not in 3.10.
DEAD_LETTER_ARGUMENTS: Final[dict[str, FieldValue]] = {
    "x-queue-type": "quorum",
    "x-delivery-limit": _NO_DELIVERY_LIMIT,
}


async def declare(channel: AbstractChannel) -> None:
    """Create what is missing. Every role does, so that any of them may come first."""
    for name, kind in EXCHANGES.items():
        await channel.declare_exchange(name, kind, durable=True)
    for queue in QUEUES:
        graveyard = await channel.declare_queue(
            queue.dead_letters, durable=True, arguments=DEAD_LETTER_ARGUMENTS
        )
        await graveyard.bind(DEAD_LETTERS, queue.dead_letters)
        living = await channel.declare_queue(queue.name, durable=True, arguments=queue.arguments)
        await living.bind(queue.exchange, queue.routing_key)
