"""How a queue is read: every message is handled, or kept, or buried with the reason."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from aio_pika import Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from pamqp.common import FieldTable

from service.postgres.outages import PostgresUnavailable
from tests.harness.in_process import running
from tests.harness.queues import count
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.model.scripted_broker import ScriptedBroker
from tests.worker.conftest import passes, publish, settings_with, take
from worker.consumers.consumer import Consumer, Malformed, confirm_copy, safe_id
from worker.rabbitmq import topology
from worker.rabbitmq.connection import open_channel
from worker.rabbitmq.topology import NOTIFICATIONS, Queue
from worker.settings import WorkerSettings


class Refused(Exception):
    """No repetition can mend this."""


class Work:
    """Handles numbers, and records them; goes wrong as the test says."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.done: list[int] = []
        self.error: Exception | None = None
        self.dependency_error: Exception | None = None
        self.most_at_once = 0
        self._at_once = 0
        self.going_on = asyncio.Event()
        self.going_on.set()

    @staticmethod
    def decode(body: bytes) -> int:
        """Read a number. Raises Malformed."""
        try:
            return msgspec.json.decode(body, type=int)
        except msgspec.DecodeError:
            raise Malformed from None

    async def handle(self, number: int) -> None:
        """Record a number once the test lets it go on, or fail."""
        self.started.append(number)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await self.going_on.wait()
        finally:
            self._at_once -= 1
        if self.error is not None:
            raise self.error
        self.done.append(number)

    async def check(self) -> None:
        """Fail while what the work depends on is away."""
        if self.dependency_error is not None:
            raise self.dependency_error


@pytest.fixture
def work() -> Work:
    """Work that succeeds unless told otherwise."""
    return Work()


MakeConsumer = Callable[..., Consumer[int]]


@pytest.fixture
def consumer_with(worker_settings: WorkerSettings, work: Work) -> MakeConsumer:
    """Makes consumers whose settings differ from the usual."""

    def make(queue: Queue = NOTIFICATIONS, **changes: Any) -> Consumer[int]:
        return Consumer(
            settings_with(worker_settings, **changes),
            queue,
            decode=work.decode,
            handle=work.handle,
            refusals=(Refused,),
            dependency=work.check,
        )

    return make


@pytest.fixture
def consumer(consumer_with: MakeConsumer) -> Consumer[int]:
    """A consumer of the notifications."""
    return consumer_with()


@pytest.fixture
async def impatient_queue(channel: AbstractChannel) -> AsyncIterator[Queue]:
    """A queue that delivers a message twice and no more."""
    queue = Queue("impatient", topology.REQUESTS, "request.impatient")
    arguments: FieldTable = {
        "x-queue-type": "quorum",
        "x-delivery-limit": 1,
        "x-dead-letter-exchange": topology.DEAD_LETTERS,
        "x-dead-letter-routing-key": queue.dead_letters,
    }
    await channel.queue_delete(queue.name)
    living = await channel.declare_queue(queue.name, durable=True, arguments=arguments)
    await living.bind(queue.exchange, queue.routing_key)
    graveyard = await channel.declare_queue(queue.dead_letters, exclusive=True)
    await graveyard.bind(topology.DEAD_LETTERS, queue.dead_letters)
    yield queue
    await channel.queue_delete(queue.name)


async def dead_letter(channel: AbstractChannel, queue: Queue = NOTIFICATIONS) -> AbstractIncomingMessage:
    """Return the next dead letter, once there is one."""
    graveyard = await channel.get_queue(queue.dead_letters)
    message = await eventually(lambda: take(graveyard))
    assert isinstance(message, AbstractIncomingMessage)
    return message


async def has_no_messages(channel: AbstractChannel, queue: str) -> bool:
    """Whether nothing is ready in a queue."""
    return await count(channel, queue) == 0


async def test_message_is_handled_once_and_leaves_the_queue(
    consumer: Consumer[int], work: Work, channel: AbstractChannel
) -> None:
    await publish(channel, NOTIFICATIONS, b"1")

    async with running(consumer.run):
        await eventually(lambda: work.done)

    assert work.done == [1]
    assert await has_no_messages(channel, NOTIFICATIONS.name)
    assert await has_no_messages(channel, NOTIFICATIONS.dead_letters)


async def test_malformed_message_goes_to_the_dead_letters_with_its_reason_and_as_it_was(
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
        "x-reason-text": "The message is not what this queue carries.",
    }
    assert await has_no_messages(channel, NOTIFICATIONS.name)


async def test_refused_message_goes_to_the_dead_letters_at_once(
    consumer: Consumer[int], work: Work, channel: AbstractChannel
) -> None:
    work.error = Refused()
    await publish(channel, NOTIFICATIONS, b"1")

    async with running(consumer.run):
        dead = await dead_letter(channel)

    assert dead.headers["x-reason"] == "Refused"
    assert dead.headers["x-reason-text"] == "No repetition can mend this."
    assert work.started == [1]


async def test_dead_letters_keep_nobody_waiting(
    consumer_with: MakeConsumer, work: Work, channel: AbstractChannel
) -> None:
    consumer = consumer_with(consumer_prefetch=1)
    for body in (b"bad", b"1", b"bad", b"2"):
        await publish(channel, NOTIFICATIONS, body)

    async with running(consumer.run):
        await eventually(lambda: work.done == [1, 2])


async def test_broker_that_blocks_dead_letters_still_gets_the_acknowledgements(
    consumer_with: MakeConsumer, work: Work, channel: AbstractChannel, broker_link: TcpProxy
) -> None:
    consumer = consumer_with(amqp_url=broker_link.url, consumer_prefetch=2, broker_timeout_seconds=60.0)

    async with running(consumer.run):
        await eventually(lambda: passes(consumer.check))
        broker_link.hold_before(topology.DEAD_LETTERS.encode())  # as an alarm does with who publishes
        await publish(channel, NOTIFICATIONS, b"bad")
        await broker_link.marker_reached.wait()
        for body in (b"1", b"2", b"3"):
            await publish(channel, NOTIFICATIONS, body)
        await eventually(lambda: work.done == [1, 2, 3])
        broker_link.resume()
        dead = await dead_letter(channel)

    assert dead.body == b"bad"


async def test_dead_letter_waits_for_the_end_of_an_alarm_and_is_published_once(
    worker_settings: WorkerSettings,
) -> None:
    async with ScriptedBroker() as scripted:
        settings = settings_with(worker_settings, amqp_url=scripted.url)
        async with open_channel(settings, name="test") as burials:
            scripted.raise_alarm()
            burying = asyncio.create_task(
                confirm_copy(burials, Message(b"", message_id="m-1"), NOTIFICATIONS, seconds=1.0)
            )
            await asyncio.wait([burying], timeout=2.5)
            was_waiting = not burying.done()
            scripted.clear_alarm()
            await burying

    assert was_waiting
    assert scripted.taken == ["m-1"]


async def test_dead_letter_that_a_silent_broker_does_not_confirm_is_an_error_in_time(
    worker_settings: WorkerSettings, broker_link: TcpProxy
) -> None:
    settings = settings_with(worker_settings, amqp_url=broker_link.url)
    async with open_channel(settings, name="test") as burials:
        broker_link.hold()
        with pytest.raises(TimeoutError):
            await confirm_copy(burials, Message(b""), NOTIFICATIONS, seconds=0.1)


async def test_no_more_is_handled_at_once_than_the_pool_has_connections(
    consumer_with: MakeConsumer, work: Work, channel: AbstractChannel
) -> None:
    consumer = consumer_with(consumer_prefetch=50, database_pool_size=3)
    work.going_on.clear()
    for number in range(10):
        await publish(channel, NOTIFICATIONS, str(number).encode())

    async with running(consumer.run):
        await eventually(lambda: has_no_messages(channel, NOTIFICATIONS.name))
        await eventually(lambda: len(work.started) == 3)
        work.going_on.set()
        await eventually(lambda: len(work.done) == 10)

    assert work.most_at_once == 3


async def test_handler_that_fails_unforeseen_gets_the_message_again_up_to_the_limit(
    consumer_with: MakeConsumer, work: Work, channel: AbstractChannel, impatient_queue: Queue
) -> None:
    work.error = ZeroDivisionError()
    await publish(channel, impatient_queue, b"1")

    async with running(consumer_with(impatient_queue).run):
        dead = await dead_letter(channel, impatient_queue)

    assert work.started == [1, 1]
    assert dead.body == b"1"
    assert "'reason': 'delivery_limit'" in str(dead.headers["x-death"])


async def test_message_whose_handler_failed_once_is_handled_in_the_end(
    consumer: Consumer[int], work: Work, channel: AbstractChannel
) -> None:
    work.error = ZeroDivisionError()
    await publish(channel, NOTIFICATIONS, b"1")

    async with running(consumer.run):
        await eventually(lambda: work.started)
        work.error = None
        await eventually(lambda: work.done)

    assert work.done == [1]


async def test_connection_that_breaks_is_replaced(
    consumer_with: MakeConsumer, work: Work, channel: AbstractChannel, broker_link: TcpProxy
) -> None:
    consumer = consumer_with(amqp_url=broker_link.url)

    async with running(consumer.run):
        await eventually(lambda: passes(consumer.check))
        await broker_link.refuse()
        await eventually(lambda: fails(consumer))
        await publish(channel, NOTIFICATIONS, b"1")
        await eventually(lambda: broker_link.refused >= 2)
        broker_link.admit()
        await eventually(lambda: work.done)
        assert await passes(consumer.check)


async def fails(consumer: Consumer[int]) -> bool:
    """Whether a consumer says that it is not reading."""
    return not await passes(consumer.check)


async def test_connection_that_breaks_in_the_middle_brings_the_message_again(
    consumer_with: MakeConsumer, work: Work, channel: AbstractChannel, broker_link: TcpProxy
) -> None:
    work.going_on.clear()
    await publish(channel, NOTIFICATIONS, b"1")

    async with running(consumer_with(amqp_url=broker_link.url).run):
        await eventually(lambda: work.started)
        await broker_link.cut()
        work.going_on.set()
        await eventually(lambda: len(work.started) == 2)
        await eventually(lambda: has_no_messages(channel, NOTIFICATIONS.name))

    assert await has_no_messages(channel, NOTIFICATIONS.dead_letters)


async def test_queue_that_is_deleted_is_declared_and_read_again(
    consumer: Consumer[int], work: Work, channel: AbstractChannel
) -> None:
    async with running(consumer.run):
        await eventually(lambda: passes(consumer.check))

        await channel.queue_delete(NOTIFICATIONS.name)
        await eventually(lambda: fails(consumer))
        await eventually(lambda: passes(consumer.check))
        await publish(channel, NOTIFICATIONS, b"1")
        await eventually(lambda: work.done)


async def test_channel_that_the_broker_closes_is_replaced_and_the_message_is_settled_after_all(
    consumer: Consumer[int], channel: AbstractChannel
) -> None:
    async with running(consumer.run):
        await eventually(lambda: passes(consumer.check))
        await channel.exchange_delete(topology.DEAD_LETTERS)  # Burying a message closes the channel now.
        await publish(channel, NOTIFICATIONS, b"bad")

        dead = await dead_letter(channel)

        assert dead.body == b"bad"
        await eventually(lambda: passes(consumer.check))


async def test_stopping_finishes_what_is_in_hand_and_leaves_the_rest_unharmed(
    consumer_with: MakeConsumer, work: Work, channel: AbstractChannel
) -> None:
    work.going_on.clear()
    for body in (b"1", b"2", b"3"):
        await publish(channel, NOTIFICATIONS, body)
    consumer, stop = consumer_with(consumer_prefetch=1), asyncio.Event()
    consuming = asyncio.create_task(consumer.run(stop))
    await eventually(lambda: work.started)

    stop.set()
    await eventually(lambda: fails(consumer))
    work.going_on.set()
    await consuming

    queue = await channel.get_queue(NOTIFICATIONS.name)
    left = [await eventually(lambda: take(queue)) for _ in range(2)]
    assert work.done == [1]
    assert [message.body for message in left] == [b"2", b"3"]
    assert not any(message.headers.get("x-delivery-count") for message in left)
    assert await has_no_messages(channel, NOTIFICATIONS.dead_letters)


async def test_postgres_away_leaves_the_message_in_the_queue_until_it_is_back(
    consumer: Consumer[int], work: Work, channel: AbstractChannel
) -> None:
    work.error = work.dependency_error = PostgresUnavailable()
    async with running(consumer.run):
        await publish(channel, NOTIFICATIONS, b"1")
        await eventually(lambda: fails(consumer))
        assert await has_no_messages(channel, NOTIFICATIONS.dead_letters)

        work.error = work.dependency_error = None
        await eventually(lambda: work.done)

    assert work.done == [1]
    assert await has_no_messages(channel, NOTIFICATIONS.dead_letters)


async def test_blip_of_postgres_costs_no_redelivery(
    consumer: Consumer[int], work: Work, channel: AbstractChannel
) -> None:
    work.error = PostgresUnavailable()
    await publish(channel, NOTIFICATIONS, b"1")

    async with running(consumer.run):
        await eventually(lambda: len(work.started) == 2)
        was_reading = await passes(consumer.check)
        work.error = None
        await eventually(lambda: work.done)

    assert was_reading


async def test_message_whose_headers_cannot_be_written_again_is_buried_all_the_same(
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


async def test_message_is_buried_nowhere_but_among_the_dead_letters_of_its_queue(
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


class NotText(str):
    """A header's value that goes over the wire in another encoding than UTF-8, as AMQP allows."""

    __slots__ = ()

    def encode(self, encoding: str = "", errors: str = "strict") -> bytes:  # noqa: ARG002 - so AMQP asks
        """Return the bytes to be sent, whatever was asked for."""
        return super().encode("latin-1", errors)


def test_ids_of_other_teams_are_logged_only_when_they_are_harmless() -> None:
    ids = [None, "", "a-b_c.d:1", "x" * 129, "line\nbreak", "naïve", "a b"]

    assert [safe_id(message_id) for message_id in ids] == [None, None, "a-b_c.d:1", None, None, None, None]
