"""Exchanges, queues and bindings as declared and kept, also under other teams' policies; lost connections."""

import asyncio
import json
from functools import partial
from typing import Any

import pytest

from tests.deploy.pages import INSTALLATION, code_blocks
from tests.harness.in_process import running
from tests.harness.queues import count, holds, write
from tests.harness.servers import run_as_operator
from tests.harness.waiting import eventually
from tests.worker.conftest import obstacle, passes, publish, settings_with, take_ids
from tests.worker.steps import bury
from worker.consumers import notifications
from worker.rabbitmq import connection, topology
from worker.rabbitmq.connection import open_channel, open_role
from worker.rabbitmq.topology import CALCULATION_RESULTS, NOTIFICATIONS

QUEUE = CALCULATION_RESULTS
IDS = [f"message-{number}" for number in range(10)]


async def test_dead_letters_live_thirty_days(channel):
    arguments = {**topology.DEAD_LETTER_ARGUMENTS, "x-message-ttl": 30 * 24 * 3600 * 1000}

    for queue in topology.QUEUES:
        await channel.declare_queue(queue.dead_letters, durable=True, arguments=arguments)


async def test_queue_with_other_properties_stops_its_own_role_alone(
    worker_settings, channel, pool, relay, calculation_consumer
):
    notified = notifications.consumer(worker_settings, pool, asyncio.Event())
    for queue in topology.QUEUES:
        await channel.queue_delete(queue.name)
    arguments = {**NOTIFICATIONS.arguments, "x-delivery-limit": 7}
    await channel.declare_queue(NOTIFICATIONS.name, durable=True, arguments=arguments)

    async def names_the_difference() -> bool:
        return "x-delivery-limit" in await obstacle(notified.check)

    async with running(relay.run, notified.run, calculation_consumer.run):
        await eventually(lambda: passes(relay.check))
        await eventually(lambda: passes(calculation_consumer.check))
        await eventually(names_the_difference)
        await channel.queue_delete(NOTIFICATIONS.name)
        await eventually(lambda: passes(notified.check))


async def test_lost_binding_is_restored(channel, worker_settings, monkeypatch):
    monkeypatch.setattr(connection, "_DECLARE_SECONDS", 0.05)
    ours = await channel.get_queue(NOTIFICATIONS.name)

    async def is_notified() -> bool:
        await write(channel, NOTIFICATIONS.exchange, NOTIFICATIONS.routing_key)
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


@pytest.fixture
def amqp_url(own_broker):
    return own_broker.url


@pytest.fixture
def control(own_broker):
    """Run commands on this test's broker. The policies that they set are removed after the test."""
    yield lambda commands: asyncio.to_thread(run_as_operator, commands, own_broker)
    every_policy = "rabbitmqctl -q list_policies --no-table-headers | cut -f2"
    run_as_operator(f"for name in $({every_policy}); do rabbitmqctl clear_policy $name; done", own_broker)


def theirs(**definition: str | int) -> str:
    return f"rabbitmqctl set_policy theirs '.*' '{json.dumps(definition)}'"


async def test_dead_letters_that_a_full_queue_refuses_stay_until_there_is_room_and_delay_no_other_message(
    calculation_consumer, channel, database, stored_request, control, logs
):
    for message_id in IDS:
        await publish(channel, QUEUE, b"bad", message_id=message_id)
    good = f'{{"request_uuid": "{stored_request.uuid}", "calculation_id": "C-1"}}'
    await publish(channel, QUEUE, good.encode())
    await control(theirs(**{"max-length": 3}))
    dead_letters, buried = await channel.get_queue(QUEUE.dead_letters), set[str | None]()

    async def all_are_buried() -> bool:
        buried.update(await take_ids(dead_letters))  # which makes room
        return buried == set(IDS)

    async with running(calculation_consumer.run):
        await eventually(lambda: database.fetchval("SELECT max(calculation_id) FROM calculation_request"))
        await eventually(lambda: "the dead-letter queue is full" in str(logs))
        await eventually(all_are_buried)

    assert "message_failed" not in str(logs)  # so no delivery was counted


async def test_policy_on_the_page_keeps_the_policies_of_other_teams_off_our_queues(channel, control):
    (ours,) = (block for block in code_blocks(INSTALLATION, "Users", "sh") if "set_policy" in block)
    limits: dict[str, Any] = {"max-length": 3, "overflow": "drop-head", "delivery-limit": 0}
    await control(f"{ours}\n{theirs(**limits, **{'message-ttl': 1, 'expires': 1})}")  # in milliseconds

    for message_id in IDS:
        await publish(channel, QUEUE, b"living", message_id=message_id)
        await bury(channel, QUEUE, b"dead", message_id=message_id)

    for name in (QUEUE.name, QUEUE.dead_letters):
        queue = await channel.get_queue(name)
        for _ in range(3):
            await (await eventually(partial(queue.get, fail=False))).reject(requeue=True)
        await eventually(partial(holds, channel, name, len(IDS)))
        assert set(await take_ids(queue)) == set(IDS)
