"""A message that can never be handled is moved to the dead letters of its queue, with the reason."""

import asyncio

from aio_pika import Message
from aio_pika.abc import AbstractChannel
from pamqp.common import FieldTable

from tests.harness.in_process import running
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.model.scripted_broker import ScriptedBroker
from tests.worker.conftest import passes, publish, settings_with, take
from tests.worker.consumers.conftest import MakeConsumer, Refused, Work, dead_letter, has_no_messages
from worker.consumers.consumer import Consumer
from worker.consumers.dead_lettering import dead_letter as bury
from worker.rabbitmq import topology
from worker.rabbitmq.connection import open_channel
from worker.rabbitmq.topology import NOTIFICATIONS
from worker.settings import WorkerSettings


async def test_malformed_message_is_dead_lettered_unchanged_with_the_reason(
    consumer: Consumer[int], channel: AbstractChannel
) -> None:
    await publish(
        channel,
        NOTIFICATIONS,
        b"not JSON \xff",
        message_id="their-id",
        content_type="text/plain",
        type="their.type",
        headers={"theirs": "kept", "number": 7},
    )

    async with running(consumer.run):
        dead = await dead_letter(channel)

    assert dead.body == b"not JSON \xff"
    assert (dead.message_id, dead.content_type, dead.type) == ("their-id", "text/plain", "their.type")
    assert {name: dead.headers[name] for name in ("theirs", "number", "x-reason", "x-reason-text")} == {
        "theirs": "kept",
        "number": 7,
        "x-reason": "Malformed",
        "x-reason-text": "not readable JSON: invalid character (byte 4)",
    }
    assert await has_no_messages(channel, NOTIFICATIONS.name)


async def test_refused_message_is_dead_lettered_at_once(
    consumer: Consumer[int], work: Work, channel: AbstractChannel
) -> None:
    work.error = Refused()
    await publish(channel, NOTIFICATIONS, b"1")

    async with running(consumer.run):
        dead = await dead_letter(channel)

    assert dead.headers["x-reason"] == "Refused"
    assert dead.headers["x-reason-text"] == "No retry can fix this."
    assert work.started == [1]


async def test_acknowledgements_pass_while_the_broker_blocks_dead_letters(
    consumer_with: MakeConsumer, work: Work, channel: AbstractChannel, broker_link: TcpProxy
) -> None:
    consumer = consumer_with(amqp_url=broker_link.url, consumer_prefetch=2)

    async with running(consumer.run):
        await eventually(lambda: passes(consumer.check))
        # As an alarm does to a connection that publishes.
        broker_link.hold_before(topology.DEAD_LETTERS.encode())
        await publish(channel, NOTIFICATIONS, b"bad")
        await broker_link.marker_reached.wait()
        for body in (b"1", b"2", b"3"):
            await publish(channel, NOTIFICATIONS, body)
        await eventually(lambda: work.done == [1, 2, 3])
        broker_link.resume()
        dead = await dead_letter(channel)

    assert dead.body == b"bad"


async def test_dead_letter_waits_for_the_end_of_an_alarm_and_is_published_once(
    worker_settings: WorkerSettings, channel: AbstractChannel
) -> None:
    await publish(channel, NOTIFICATIONS, b"bad", message_id="m-1")
    message = await (await channel.get_queue(NOTIFICATIONS.name)).get()
    async with ScriptedBroker() as scripted:
        settings = settings_with(worker_settings, amqp_url=scripted.url, broker_timeout_seconds=0.5)
        async with open_channel(settings, name="test") as dead_letters:
            scripted.raise_alarm()
            burying = asyncio.create_task(bury(dead_letters, message, NOTIFICATIONS, Refused()))
            await asyncio.wait([burying], timeout=0.8)  # longer than for other answers
            was_waiting = not burying.done()
            scripted.clear_alarm()
            await burying

    assert was_waiting
    assert scripted.taken == ["m-1"]


async def test_message_with_a_header_that_cannot_be_copied_is_dead_lettered_without_it(
    consumer_with: MakeConsumer, work: Work, channel: AbstractChannel
) -> None:
    exchange = await channel.get_exchange(NOTIFICATIONS.exchange)
    consumer = consumer_with(consumer_prefetch=1)

    async with running(consumer.run):
        await exchange.publish(
            Message(b"bad", headers={"theirs": NotText("latin-1: \xe9"), "kept": "yes"}),
            NOTIFICATIONS.routing_key,
        )
        dead = await dead_letter(channel)

        assert (dead.body, dead.headers["x-reason"], dead.headers["kept"]) == (b"bad", "Malformed", "yes")
        await publish(channel, NOTIFICATIONS, b"1")
        await eventually(lambda: work.done == [1])


class NotText(str):
    """A header value that is sent in another encoding than UTF-8, as AMQP allows."""

    __slots__ = ()

    def encode(self, encoding: str = "", errors: str = "strict") -> bytes:  # noqa: ARG002 - pamqp passes one
        """Return the text in Latin-1, whatever *encoding* is asked for."""
        return super().encode("latin-1", errors)


async def test_dead_letter_reaches_no_other_queue_than_the_dead_letters_of_its_own(
    consumer: Consumer[int], channel: AbstractChannel
) -> None:
    theirs = await channel.declare_queue(exclusive=True)
    await theirs.bind(topology.DEAD_LETTERS, theirs.name)
    headers: FieldTable = {"CC": [theirs.name], "cc": "kept"}
    await publish(channel, NOTIFICATIONS, b"bad", headers=headers)

    async with running(consumer.run):
        dead = await dead_letter(channel)

    assert (dead.body, dead.headers["cc"]) == (b"bad", "kept")
    assert await take(theirs) is None
