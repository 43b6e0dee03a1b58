"""A consumer handles and settles each message, through outages of RabbitMQ and Postgres."""

import asyncio

import pytest

from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import open_pool
from tests.harness import databases
from tests.harness.in_process import running
from tests.harness.metrics import value
from tests.harness.queues import count, holds
from tests.harness.standby import replicated
from tests.harness.waiting import eventually
from tests.worker.conftest import obstacle, passes, publish, settings_with, take
from tests.worker.consumers.conftest import dead_letter
from worker.consumers.consumer import settle
from worker.consumers.incoming import safe_id
from worker.rabbitmq.connection import open_channel
from worker.rabbitmq.topology import NOTIFICATIONS


async def test_message_that_fails_is_a_dead_letter_after_21_deliveries(consumer, work, channel, monkeypatch):
    monkeypatch.setattr("worker.consumers.consumer._RETRY_SECONDS", 0.0)
    work.error = ZeroDivisionError()
    await publish(channel, NOTIFICATIONS, b"1")

    async with running(consumer.run):
        dead = await dead_letter(channel)

    assert work.started == [1] * 21
    assert dead.body == b"1"
    assert "'reason': 'delivery_limit'" in str(dead.headers["x-death"])


async def test_lost_connection_is_replaced_and_the_message_in_hand_delays_no_other_and_is_redelivered(
    consumer_with, work, channel, broker_link, logs
):
    consumer = consumer_with(amqp_url=broker_link.url)
    connection = {"connection": NOTIFICATIONS.name}
    work.locked = {1}  # its row, so it is tried again and again
    await publish(channel, NOTIFICATIONS, b"1")

    async with running(consumer.run):
        await eventually(lambda: work.started)
        assert value("broker_connected", **connection) == 1
        await broker_link.refuse()
        await eventually(lambda: obstacle(consumer.check))
        # It does not wait for the message in hand, for up to half of SHUTDOWN_SECONDS, which is ten seconds.
        await eventually(lambda: value("broker_connected", **connection) == 0, seconds=8.0)
        await publish(channel, NOTIFICATIONS, b"2")
        await eventually(lambda: broker_link.refused >= 2)
        broker_link.admit()
        await eventually(lambda: work.done == [2])
        assert await passes(consumer.check)
        work.locked = set()
        await eventually(lambda: work.done == [2, 1])
        await eventually(lambda: holds(channel, NOTIFICATIONS.name, 0))

    assert await holds(channel, NOTIFICATIONS.dead_letters, 0)
    assert "message_failed" not in str(logs)


async def test_deleted_queue_is_declared_and_read_again(consumer, work, channel):
    async with running(consumer.run):
        await eventually(lambda: passes(consumer.check))

        await channel.queue_delete(NOTIFICATIONS.name)
        await eventually(lambda: obstacle(consumer.check))
        await eventually(lambda: passes(consumer.check))
        await publish(channel, NOTIFICATIONS, b"1")
        await eventually(lambda: work.done)


async def test_stopping_finishes_the_message_in_hand_and_leaves_others_queued(consumer_with, work, channel):
    work.going_on.clear()
    for body in (b"1", b"2", b"3"):
        await publish(channel, NOTIFICATIONS, body)
    consumer, stop = consumer_with(consumer_prefetch=1), asyncio.Event()
    consuming = asyncio.create_task(consumer.run(stop))
    await eventually(lambda: work.started)

    stop.set()
    await eventually(lambda: obstacle(consumer.check))
    work.going_on.set()
    await consuming

    queue = await channel.get_queue(NOTIFICATIONS.name)
    left = [await eventually(lambda: take(queue)) for _ in range(2)]
    assert work.done == [1]
    assert [message.body for message in left] == [b"2", b"3"]
    assert not any(message.headers.get("x-delivery-count") for message in left)
    assert await holds(channel, NOTIFICATIONS.dead_letters, 0)


async def test_outage_of_postgres_leaves_the_message_in_the_queue_until_it_ends(consumer, work, channel):
    work.error = PostgresUnavailable()
    async with running(consumer.run):
        await publish(channel, NOTIFICATIONS, b"1")
        await eventually(lambda: len(work.started) > 2)
        assert await holds(channel, NOTIFICATIONS.dead_letters, 0)

        work.error = None
        await eventually(lambda: work.done)

    assert work.done == [1]
    assert await holds(channel, NOTIFICATIONS.dead_letters, 0)


async def test_queue_is_opened_only_when_commits_end(consumer_with, worker_settings, work, channel, logs):
    """While Postgres answers and no commit ends, as without its standby, the messages stay in their queue."""
    await publish(channel, NOTIFICATIONS, b"1")
    async with replicated() as servers:
        url = databases.as_role(servers.primary_url, "worker")
        async with open_pool(settings_with(worker_settings, database_url=url)) as pool:
            await servers.cut_off()
            async with running(consumer_with(pool, database_timeout_seconds=0.2).run):
                await eventually(lambda: "consumer_paused" in str(logs))
                left = await count(channel, NOTIFICATIONS.name)
                await servers.admit()
                await eventually(lambda: work.done)

    assert left == 1
    assert "consumer_started" not in str(logs[: [line["event"] for line in logs].index("consumer_paused")])


def test_message_ids_of_other_teams_are_logged_only_when_they_are_safe():
    ids = [None, "", "a-b_c.d:1", "x" * 129, "line\nbreak", "naïve", "a b"]

    assert [safe_id(message_id) for message_id in ids] == [None, None, "a-b_c.d:1", None, None, None, None]


@pytest.mark.parametrize("outcome", ["handled", "returned"])
async def test_message_that_cannot_be_settled_gives_the_channel_up(worker_settings, channel, outcome):
    await publish(channel, NOTIFICATIONS, b"1")
    async with open_channel(worker_settings, name="test") as own_channel:
        leaving = asyncio.Event()
        message = await (await own_channel.get_queue(NOTIFICATIONS.name, ensure=False)).get()
        await message.ack()

        await settle(message, outcome, leaving)

    assert leaving.is_set()
