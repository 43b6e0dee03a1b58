"""Fixtures and queries of the tests of the relay."""

from collections.abc import AsyncIterator

import pytest
from aio_pika import Message
from aio_pika.abc import AbstractChannel, AbstractQueue

from service.calculation_requests.model import CalculationRequest
from tests.harness.tcp_proxy import TcpProxy
from tests.worker.conftest import bind_tap, open_publisher, settings_with
from worker.relay.publisher import Publisher
from worker.settings import EmailSettings


@pytest.fixture
async def linked_publisher(worker_settings: EmailSettings, broker_link: TcpProxy) -> AsyncIterator[Publisher]:
    """A publisher with a long timeout, whose connection the test can hold and cut."""
    settings = settings_with(worker_settings, amqp_url=broker_link.url, broker_timeout_seconds=30.0)
    async with open_publisher(settings) as opened:
        yield opened
        broker_link.resume()


async def bind_full_queue(channel: AbstractChannel, routing_key: str) -> AbstractQueue:
    """Bind a full queue: the broker refuses events with this key, and other queues still get them."""
    full = await bind_tap(channel, routing_key, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    await channel.default_exchange.publish(Message(b""), full.name)
    return full


def id_of(request: CalculationRequest) -> str:
    """Return the id of the request's first event."""
    return f"{request.uuid}.request.created.1"
