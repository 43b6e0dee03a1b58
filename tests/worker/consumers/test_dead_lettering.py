"""A message that can never be handled is moved to the dead letters of its queue, with the reason."""

import asyncio

import aio_pika
import pytest
from aio_pika import Message
from aiormq.exceptions import AMQPError
from pamqp.common import FieldTable

from tests.harness.in_process import running
from tests.harness.queues import holds
from tests.harness.raw_messages import UNDECODABLE, NotText, RawMessage
from tests.harness.scripted_broker import ScriptedBroker
from tests.harness.waiting import eventually
from tests.worker.conftest import passes, publish, settings_with, store, take, take_all
from tests.worker.consumers.conftest import dead_letter
from worker.batches import TryAgain
from worker.consumers.dead_lettering import publish_letters
from worker.rabbitmq import topology
from worker.rabbitmq.topology import CALCULATION_RESULTS, NOTIFICATIONS

PUBLISH_SECONDS = 5.0  # RabbitMQ may close the connection, or answer nothing.


async def test_malformed_message_is_dead_lettered_with_the_reason_to_its_own_queue_alone(consumer, channel):
    theirs = await channel.declare_queue(exclusive=True)
    await theirs.bind(topology.DEAD_LETTERS, theirs.name)
    kept: FieldTable = {"theirs": "kept", "number": 7, "cc": "kept"}
    left_out: FieldTable = {"CC": [theirs.name], "x-user-id": "another team", "X-User-Id": "another team"}
    properties = {"message_id": "their-id", "content_type": "text/plain", "type": "their.type"}
    await publish(channel, NOTIFICATIONS, b"not JSON \xff", headers=kept | left_out, **properties)

    async with running(consumer.run):
        dead = await dead_letter(channel)

    assert dead.body == b"not JSON \xff"
    assert {name: getattr(dead, name) for name in properties} == properties
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

    assert dead.body == b"bad"
    assert work.started == [1, 2, 3]
    assert {each["log_level"] for each in logs if each["event"] == "message_failed"} == {"warning"}


async def test_no_copy_counts_as_published_when_copies_with_one_id_are_returned(worker_settings, channel):
    dead_letters = await channel.get_queue(NOTIFICATIONS.dead_letters)
    await dead_letters.unbind(topology.DEAD_LETTERS, NOTIFICATIONS.dead_letters)
    copies = [Message(str(number).encode(), message_id="same") for number in range(3)]

    failures = await publish_letters(worker_settings, NOTIFICATIONS, copies)

    assert all(isinstance(failure, TryAgain) for failure in failures)
    assert len(failures) == len(copies)


@pytest.mark.parametrize(("body", "is_confirmed"), [(b"not empty", False), (b"", True)])
async def test_alarm_repeats_at_most_one_dead_letter(worker_settings, body, is_confirmed):
    letters = [Message(body, message_id=str(number)) for number in range(20)]
    async with ScriptedBroker() as broker:
        settings = settings_with(worker_settings, amqp_url=broker.url, broker_timeout_seconds=0.5)
        broker.raise_alarm()

        first, *others = await publish_letters(settings, NOTIFICATIONS, letters)

        assert (first is None) == is_confirmed
        assert {type(failure) for failure in others} == {TimeoutError}
        broker.clear_alarm()
        assert await publish_letters(settings, NOTIFICATIONS, [Message(b"", message_id="next")]) == [None]
    assert set(broker.taken) <= {"0", "next"}


async def test_routing_key_that_is_not_utf8_ends_no_connection(consumer, work, channel):
    exchange = await channel.get_exchange(NOTIFICATIONS.exchange)
    message = Message(b"1", headers={"CC": [NOTIFICATIONS.routing_key]})
    await exchange.publish(message, NotText("\xe9"), mandatory=True)

    async with running(consumer.run):
        await eventually(lambda: work.done == [1])


def result(uuid: str) -> bytes:
    return f'{{"request_uuid": "{uuid}", "calculation_id": "C-1"}}'.encode()


async def is_accepted(amqp_url: str, body: bytes, name: str, written: bytes) -> bool:
    """Publish over a new connection, because a refusal closes it. Returns whether the broker confirmed."""
    try:
        async with await aio_pika.connect(amqp_url) as connection, asyncio.timeout(PUBLISH_SECONDS):
            channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            exchange = await channel.get_exchange(CALCULATION_RESULTS.exchange)
            message = RawMessage(body, name, written)
            await exchange.publish(message, CALCULATION_RESULTS.routing_key, mandatory=True)
    except (AMQPError, OSError, TimeoutError, asyncio.CancelledError):
        return False
    return True


async def test_message_with_an_undecodable_property_is_refused_by_the_broker_or_dead_lettered(
    worker_settings, calculation_consumer, channel, database
):
    requests = [await store(database) for _ in UNDECODABLE]
    bodies = [result(request.uuid) for request in requests]
    accepted = {
        body
        for body, written in zip(bodies, UNDECODABLE.values(), strict=True)
        if await is_accepted(worker_settings.amqp_url, body, *written)
    }

    async with running(calculation_consumer.run):
        await eventually(lambda: holds(channel, CALCULATION_RESULTS.dead_letters, len(accepted)))

    dead = await take_all(await channel.get_queue(CALCULATION_RESULTS.dead_letters))
    assert {letter.headers["x-reason"] for letter in dead} == {"Malformed"}
    assert {letter.body for letter in dead} == accepted
    assert await database.fetchval("SELECT count(calculation_id) FROM calculation_request") == 0
    assert len(accepted) > len(UNDECODABLE) / 2
