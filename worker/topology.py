"""Exchanges, queues and bindings, in one place. Declaring them again changes nothing."""

from typing import Final

import msgspec
from aio_pika import ExchangeType
from aio_pika.abc import AbstractChannel

from service.events import CalculationCreated, RequestCreated

REQUESTS: Final = "calculation-requests"  # the exchange of our events
CALCULATIONS: Final = "calculations"  # the exchange of the calculation teams
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


NOTIFICATIONS: Final = Queue("notifications", REQUESTS, RequestCreated.type)
CALCULATION_RESULTS: Final = Queue("calculation-results", CALCULATIONS, CalculationCreated.type)


async def declare(channel: AbstractChannel) -> None:
    """Create what is missing. Every role does, so that any of them may come first."""
    for name in (REQUESTS, CALCULATIONS):
        await channel.declare_exchange(name, ExchangeType.TOPIC, durable=True)
    await channel.declare_exchange(DEAD_LETTERS, ExchangeType.DIRECT, durable=True)
    for queue in (NOTIFICATIONS, CALCULATION_RESULTS):
        await _declare_queue(channel, queue)


async def _declare_queue(channel: AbstractChannel, queue: Queue) -> None:
    graveyard = await channel.declare_queue(
        queue.dead_letters,
        durable=True,
        # RabbitMQ 4 would drop what has been looked at twenty times. The number -1, for none, is not in 3.10.
        arguments={"x-queue-type": "quorum", "x-delivery-limit": _NO_DELIVERY_LIMIT},
    )
    await graveyard.bind(DEAD_LETTERS, queue.dead_letters)
    living = await channel.declare_queue(
        queue.name,
        durable=True,
        arguments={
            "x-queue-type": "quorum",
            "x-delivery-limit": DELIVERY_LIMIT,
            "x-dead-letter-exchange": DEAD_LETTERS,
            "x-dead-letter-routing-key": queue.dead_letters,
            # At-least-once holds only together with reject-publish: else RabbitMQ falls back silently.
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        },
    )
    await living.bind(queue.exchange, queue.routing_key)
