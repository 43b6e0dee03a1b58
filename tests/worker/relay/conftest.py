"""What the tests of the relay have in common: a queue that refuses events, and the ids of events."""

from aio_pika import Message
from aio_pika.abc import AbstractChannel, AbstractQueue

from service.calculation_requests.model import CalculationRequest
from tests.worker.conftest import bind_tap


async def bind_full_queue(channel: AbstractChannel, routing_key: str) -> AbstractQueue:
    """Bind a full queue: the broker refuses events with this key, and other queues still get them."""
    full = await bind_tap(channel, routing_key, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    await channel.default_exchange.publish(Message(b""), full.name)
    return full


def id_of(request: CalculationRequest) -> str:
    """Return the id of the request's first event."""
    return f"{request.uuid}.request.created.1"
