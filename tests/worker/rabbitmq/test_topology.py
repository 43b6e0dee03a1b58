"""Exchanges, queues and bindings as declared; declaring them again changes nothing. Lost connections."""

import asyncio

import pytest
from aio_pika import Message

from tests.harness.in_process import running
from tests.harness.queues import count
from tests.harness.waiting import eventually
from tests.worker.conftest import Check, obstacle, passes, settings_with
from worker.consumers import notifications
from worker.rabbitmq import connection, topology
from worker.rabbitmq.connection import open_channel, open_role
from worker.rabbitmq.topology import CALCULATION_RESULTS, NOTIFICATIONS

QUEUES = pytest.mark.parametrize("queue", [NOTIFICATIONS, CALCULATION_RESULTS], ids=lambda queue: queue.name)


@QUEUES
async def test_dead_letters_live_thirty_days(channel, queue):
    arguments = {**topology.DEAD_LETTER_ARGUMENTS, "x-message-ttl": 30 * 24 * 3600 * 1000}

    await channel.declare_queue(queue.dead_letters, durable=True, arguments=arguments)


async def test_queue_with_other_properties_stops_its_own_role_alone(
    worker_settings, channel, pool, relay, calculation_consumer
):
    notified = notifications.consumer(worker_settings, pool, asyncio.Event())
    await channel.queue_delete(NOTIFICATIONS.name)
    await channel.declare_queue(
        NOTIFICATIONS.name, durable=True, arguments={**NOTIFICATIONS.arguments, "x-delivery-limit": 7}
    )
    await channel.queue_delete(CALCULATION_RESULTS.name)

    async with running(relay.run, notified.run, calculation_consumer.run):
        await eventually(lambda: passes(relay.check))
        await eventually(lambda: passes(calculation_consumer.check))
        says = await eventually(lambda: difference(notified.check))
        await channel.queue_delete(NOTIFICATIONS.name)
        await eventually(lambda: passes(notified.check))

    assert "x-delivery-limit" in says


async def difference(check: Check) -> str:
    """Return why a readiness check fails, if it is for a difference in the topology."""
    reason = await obstacle(check)
    return reason if "PRECONDITION_FAILED" in reason else ""


async def test_lost_binding_is_restored(channel, worker_settings, monkeypatch):
    monkeypatch.setattr(connection, "_DECLARE_SECONDS", 0.05)
    exchange = await channel.get_exchange(topology.REQUESTS)
    ours = await channel.get_queue(NOTIFICATIONS.name)
    theirs = await channel.declare_queue(exclusive=True)
    await theirs.bind(topology.REQUESTS, "#")

    async def is_notified() -> bool:
        await exchange.publish(Message(b"{}"), NOTIFICATIONS.routing_key)
        return await count(channel, NOTIFICATIONS.name) > 0

    async with open_role(worker_settings, name="test", needs=[]):
        await ours.unbind(NOTIFICATIONS.exchange, NOTIFICATIONS.routing_key)
        await eventually(is_notified)


async def test_broker_that_falls_silent_is_lost_after_a_few_heartbeats(
    worker_settings, broker_link, monkeypatch
):
    monkeypatch.setattr(connection, "_HEARTBEAT_SECONDS", 1)
    settings = settings_with(worker_settings, amqp_url=broker_link.url)

    async with open_channel(settings, name="test") as channel:
        broker_link.hold()
        await eventually(lambda: channel.is_closed, seconds=30)
        broker_link.resume()
