"""A consumer handles, settles or dead-letters each message, through outages of RabbitMQ and Postgres."""

import asyncio
from contextlib import suppress

import pytest
from aio_pika import Message
from pamqp.commands import Basic
from pamqp.common import FieldTable

from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import open_pool
from tests.harness import databases
from tests.harness.in_process import running
from tests.harness.metrics import value
from tests.harness.queues import UNDECODABLE, NotText, RawMessage, count, holds, open_channel
from tests.harness.scripted_broker import ScriptedBroker
from tests.harness.standby import replicated
from tests.harness.waiting import eventually
from tests.worker.conftest import obstacle, passes, publish, settings_with, store, take, take_all
from tests.worker.consumers.conftest import dead_letter
from worker.batches import TryAgain
from worker.consumers.consumer import settle
from worker.consumers.dead_lettering import publish_letters
from worker.consumers.incoming import safe_id
from worker.rabbitmq import message_properties, topology
from worker.rabbitmq.connection import BROKER_ERRORS
from worker.rabbitmq.topology import CALCULATION_RESULTS, NOTIFICATIONS


async def test_message_that_fails_is_a_dead_letter_after_21_deliveries(consumer, work, channel, monkeypatch):
    monkeypatch.setattr("worker.consumers.consumer._RETRY_SECONDS", 0.0)
    work.error = ZeroDivisionError()
    await publish(channel, NOTIFICATIONS, b"1")

    async with running(consumer.run):
        dead = await dead_letter(channel)

    assert (work.started, dead.body) == ([1] * 21, b"1")
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


async def test_deleted_queue_is_read_again_and_an_outage_of_postgres_leaves_its_messages_there(
    consumer, work, channel
):
    work.error = PostgresUnavailable()
    async with running(consumer.run):
        await eventually(lambda: passes(consumer.check))
        await channel.queue_delete(NOTIFICATIONS.name)
        await eventually(lambda: obstacle(consumer.check))
        await eventually(lambda: passes(consumer.check))

        await publish(channel, NOTIFICATIONS, b"1")
        await eventually(lambda: len(work.started) > 2)
        work.error = None
        await eventually(lambda: work.done)

    assert work.done == [1]
    assert await holds(channel, NOTIFICATIONS.dead_letters, 0)


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
    assert [(each.body, each.headers.get("x-delivery-count", 0)) for each in left] == [(b"2", 0), (b"3", 0)]
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
    assert safe_id("a-b_c.d:1") == "a-b_c.d:1"
    assert {*map(safe_id, (None, "", "x" * 129, "line\nbreak", "naïve", "a b"))} == {None}


@pytest.mark.parametrize("outcome", ["handled", "returned"])
async def test_message_that_cannot_be_settled_gives_the_channel_up(amqp_url, channel, outcome):
    leaving = asyncio.Event()
    await publish(channel, NOTIFICATIONS, b"1")
    async with open_channel(amqp_url) as own:
        message = await (await own.get_queue(NOTIFICATIONS.name)).get()
        await message.ack()
        await settle(message, outcome, leaving)

    assert leaving.is_set()


async def test_malformed_message_is_dead_lettered_with_the_reason_to_its_own_queue_alone(consumer, channel):
    theirs = await channel.declare_queue(exclusive=True)
    await theirs.bind(topology.DEAD_LETTERS, theirs.name)
    kept: FieldTable = {"theirs": "kept", "number": 7, "cc": "kept"}
    left_out: FieldTable = {"CC": [theirs.name], "x-user-id": "another team", "X-User-Id": "another team"}
    properties = {"message_id": "their-id", "content_type": "text/plain", "type": "their.type"}
    body = b"not JSON \xff"
    await publish(channel, NOTIFICATIONS, body, headers=kept | left_out, **properties)

    async with running(consumer.run):
        dead = await dead_letter(channel)

    assert {name: getattr(dead, name) for name in ("body", *properties)} == {"body": body, **properties}
    reason = {"x-reason": "Malformed", "x-reason-text": "not readable JSON: invalid character (byte 4)"}
    dead.headers.pop("x-delivery-count", None)  # RabbitMQ's own
    assert dead.headers == kept | reason
    assert await take(theirs) is None
    assert await holds(channel, NOTIFICATIONS.name, 0)


async def test_dead_letter_that_is_not_confirmed_in_time_is_tried_again_and_delays_no_other_message(
    consumer_with, work, channel, broker_link, logs
):
    consumer = consumer_with(amqp_url=broker_link.url, consumer_prefetch=2, broker_timeout_seconds=1.0)

    async with running(consumer.run):
        await eventually(lambda: passes(consumer.check))
        # As an alarm does to a connection that publishes.
        broker_link.hold_before(topology.DEAD_LETTERS.encode())
        await publish(channel, NOTIFICATIONS, b"bad")
        await broker_link.marker_reached.wait()
        for body in (b"1", b"2", b"3"):
            await publish(channel, NOTIFICATIONS, body)
        await eventually(lambda: work.done == [1, 2, 3])
        await eventually(lambda: "message_failed" in str(logs))
        broker_link.resume()
        dead = await dead_letter(channel)
        assert await passes(consumer.check)

    assert (dead.body, work.started) == (b"bad", [1, 2, 3])
    assert {each["log_level"] for each in logs if each["event"] == "message_failed"} == {"warning"}


async def test_no_copy_counts_as_published_when_copies_with_one_id_are_returned(worker_settings, channel):
    dead_letters = await channel.get_queue(NOTIFICATIONS.dead_letters)
    await dead_letters.unbind(topology.DEAD_LETTERS, NOTIFICATIONS.dead_letters)
    copies = [Message(str(number).encode(), message_id="same") for number in range(3)]

    failures = await publish_letters(worker_settings, NOTIFICATIONS, copies)

    assert [type(failure) for failure in failures] == [TryAgain] * 3


@pytest.mark.parametrize(("body", "is_confirmed"), [(b"not empty", False), (b"", True)])
async def test_alarm_repeats_at_most_one_dead_letter(worker_settings, body, is_confirmed):
    letters = [Message(body, message_id=str(number)) for number in range(20)]
    async with ScriptedBroker() as broker:
        settings = settings_with(worker_settings, amqp_url=broker.url, broker_timeout_seconds=0.5)
        broker.reading.clear()

        first, *others = await publish_letters(settings, NOTIFICATIONS, letters)

        assert (first is None, {type(failure) for failure in others}) == (is_confirmed, {TimeoutError})
        broker.reading.set()
        patient = settings_with(settings, broker_timeout_seconds=30.0)
        assert await publish_letters(patient, NOTIFICATIONS, [Message(b"", message_id="next")]) == [None]
    assert set(broker.taken) <= {"0", "next"}


async def test_routing_key_that_is_not_utf8_ends_no_connection(consumer, work, channel):
    exchange = await channel.get_exchange(NOTIFICATIONS.exchange)
    message = Message(b"1", headers={"CC": [NOTIFICATIONS.routing_key]})
    await exchange.publish(message, NotText("\xe9"), mandatory=True)

    async with running(consumer.run):
        await eventually(lambda: work.done == [1])


async def test_message_with_an_undecodable_property_is_refused_by_the_broker_or_dead_lettered(
    worker_settings, calculation_consumer, channel, database
):
    accepted = set[bytes]()
    for written in UNDECODABLE.values():
        body = f'{{"request_uuid": "{(await store(database)).uuid}", "calculation_id": "C-1"}}'.encode()
        # Over a new connection, because a refusal closes it, or RabbitMQ answers nothing.
        with suppress(*BROKER_ERRORS, asyncio.CancelledError):
            async with open_channel(worker_settings.amqp_url) as own, asyncio.timeout(5.0):
                exchange = await own.get_exchange(CALCULATION_RESULTS.exchange)
                message = RawMessage(body, *written)
                await exchange.publish(message, CALCULATION_RESULTS.routing_key, mandatory=True)
                accepted.add(body)

    async with running(calculation_consumer.run):
        await eventually(lambda: holds(channel, CALCULATION_RESULTS.dead_letters, len(accepted)))

    dead = await take_all(await channel.get_queue(CALCULATION_RESULTS.dead_letters))
    assert {letter.headers["x-reason"] for letter in dead} == {"Malformed"}
    assert {letter.body for letter in dead} == accepted
    assert await database.fetchval("SELECT count(calculation_id) FROM calculation_request") == 0
    assert len(accepted) > len(UNDECODABLE) / 2


# What aio-pika refuses, too.
REFUSED = {"delivery_mode 3": ("delivery_mode", b"\x03"), "expiration of a word": ("expiration", b"\x01x")}


@pytest.mark.parametrize(("name", "written"), (UNDECODABLE | REFUSED).values(), ids=UNDECODABLE | REFUSED)
def test_undecodable_property_is_left_out_and_named_and_the_others_are_read(name, written):
    parts = {"user_id": b"\x02me", "app_id": b"\x02we"} | {name: written}
    data = b"".join(parts[each] for each in Basic.Properties.attributes() if each in parts)
    properties = Basic.Properties()

    properties.unmarshal(sum(Basic.Properties.flags[each] for each in parts), data)

    assert properties.headers == {message_properties.UNDECODABLE: name}
    assert (properties.user_id, properties.app_id) == ("me", None if name == "app_id" else "we")
