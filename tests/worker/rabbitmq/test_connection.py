"""Connections to RabbitMQ."""

from tests.harness.waiting import eventually
from tests.worker.conftest import settings_with
from worker.rabbitmq import connection
from worker.rabbitmq.connection import open_channel


async def test_broker_that_falls_silent_is_lost_after_a_few_heartbeats(
    worker_settings, broker_link, monkeypatch
):
    monkeypatch.setattr(connection, "_HEARTBEAT_SECONDS", 1)
    settings = settings_with(worker_settings, amqp_url=broker_link.url)

    async with open_channel(settings, name="test") as channel:
        broker_link.hold()
        await eventually(lambda: channel.is_closed, seconds=30)
        broker_link.resume()
