"""`dead-letters list|redrive`: reading removes nothing, and messages move back in order."""

import asyncio
from functools import partial
from typing import Any

import click
import pytest
from aio_pika import DeliveryMode
from aio_pika.abc import AbstractChannel

from service.every_firm import operator_actions
from tests.harness.queues import count, holds
from tests.harness.raw_messages import UNDECODABLE as RAW
from tests.harness.raw_messages import RawMessage
from tests.harness.waiting import eventually
from tests.worker.commands.conftest import command, rendered
from tests.worker.commands.steps import bury, key_of
from tests.worker.conftest import created_body, publish, settings_with, store, take, take_all
from worker.commands import dead_letters
from worker.commands.dead_letters import DeadLetters, Redriven
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BrokerUnavailable
from worker.rabbitmq.message_properties import UNDECODABLE
from worker.rabbitmq.topology import CALCULATION_RESULTS, NOTIFICATIONS
from worker.settings import WorkerSettings

QUEUE = NOTIFICATIONS.name


async def bury_undecodable(channel: AbstractChannel) -> None:
    """Dead-letter one message for each way not to be decodable, as RabbitMQ does at the delivery limit."""
    exchange = await channel.get_exchange(topology.DEAD_LETTERS)
    for name, written in RAW.values():
        await exchange.publish(RawMessage(b"{}", name, written), NOTIFICATIONS.dead_letters, mandatory=True)


async def bury_many(channel: AbstractChannel, number: int) -> list[str]:
    """Dead-letter messages of the notifications. Returns their ids."""
    ids = [f"message-{position}" for position in range(number)]
    for message_id in ids:
        await bury(channel, NOTIFICATIONS, message_id.encode(), message_id=message_id)
    return ids


async def ids_in(channel: AbstractChannel, queue: str, number: int) -> list[str | None]:
    """Wait until a queue has this many messages, take them all, and return their ids."""
    await eventually(lambda: holds(channel, queue, number))
    return [message.message_id for message in await take_all(await channel.get_queue(queue))]


async def listing_of(settings: WorkerSettings, *words: str) -> DeadLetters:
    """Return the dead letters of the notifications, as `dead-letters list` shows them."""
    answer = await command(settings, "dead-letters", "list", QUEUE, *words)
    listings: list[DeadLetters] = answer.data
    return listings[0]


async def test_both_queues_are_listed_when_none_is_named(worker_settings, channel):
    await bury(channel, CALCULATION_RESULTS, b"{}")

    answer = await command(worker_settings, "dead-letters", "list")

    lines = answer.text.splitlines()
    assert lines[0] == "notifications.dead-letters: 0 messages"
    assert lines[2] == "calculation-results.dead-letters: 1 messages"
    assert lines[4].split()[:4] == ["no.", "message", "id", "type"]


@pytest.mark.parametrize(
    ("headers", "reason", "text"),
    [
        (
            {"x-reason": "RequestNotFound", "x-reason-text": "data.uuid: there is no such request"},
            *("RequestNotFound", "data.uuid: there is no such request"),
        ),
        ({"x-death": ["odd", {"count": "many"}], "x-reason": 7}, "7", None),
    ],
)
async def test_message_is_listed_with_the_reason_whatever_its_headers_hold(
    worker_settings, channel, headers, reason, text
):
    await bury(channel, NOTIFICATIONS, b"{}", message_id="m-1", type="request.created", headers=headers)

    [letter] = (await listing_of(worker_settings)).letters

    assert (letter.position, letter.message_id, letter.type) == (1, "m-1", "request.created")
    assert (letter.reason, letter.reason_text) == (reason, text)


async def test_listing_removes_nothing_and_keeps_the_order(worker_settings, channel):
    ids = await bury_many(channel, 300)

    for limit in ("7", "100", "1000"):
        listing = await listing_of(worker_settings, "--limit", limit)
        assert listing.count == 300
        assert [letter.message_id for letter in listing.letters] == ids[: int(limit)]

    assert await ids_in(channel, NOTIFICATIONS.dead_letters, 300) == ids


async def test_body_is_shown_only_of_a_message_that_is_named_by_its_id_or_position(worker_settings, channel):
    body = b'{"customer": "ada@customer.example.com\x1b[2J"}\xff'
    await bury(channel, NOTIFICATIONS, body, message_id="m-1", headers={"x-reason": "Malformed"})
    await bury(channel, NOTIFICATIONS, b"second")
    words = ("dead-letters", "list", QUEUE)

    listed = await command(worker_settings, *words)
    shown = await command(worker_settings, *words, "--message-id", "m-1")
    [second] = (await listing_of(worker_settings, "--position", "2")).letters

    assert "ada@" not in rendered(listed)
    assert "m-1" in shown.text
    assert "x-reason: Malformed" in shown.text
    assert shown.text.endswith('{"customer": "ada@customer.example.com\\x1b[2J"}\\xff')
    assert (second.position, second.body) == (2, "second")


async def test_redriven_messages_keep_their_order(worker_settings, channel):
    ids = await bury_many(channel, 120)

    answer = await command(worker_settings, "dead-letters", "redrive", QUEUE)

    assert answer.data == Redriven(QUEUE, 120, 0, 0)
    assert await ids_in(channel, QUEUE, 120) == ids
    assert await count(channel, NOTIFICATIONS.dead_letters) == 0


async def test_only_the_messages_named_are_redriven_and_the_others_stay_in_order(worker_settings, channel):
    ids = await bury_many(channel, 250)  # more than are held in memory otherwise
    chosen = [ids[245], ids[3]]
    options = [word for message_id in chosen for word in ("--message-id", message_id)]

    answer = await command(worker_settings, "dead-letters", "redrive", QUEUE, *options)

    assert answer.data == Redriven(QUEUE, 2, 248, 0)
    assert await ids_in(channel, QUEUE, 2) == [ids[3], ids[245]]
    rest = [message_id for message_id in ids if message_id not in chosen]
    assert await ids_in(channel, NOTIFICATIONS.dead_letters, 248) == rest


async def test_redriven_message_is_as_it_was_before_it_died(worker_settings, channel):
    await publish(
        channel,
        NOTIFICATIONS,
        b"body",
        message_id="m-1",
        type="request.created",
        content_type="application/json",
        correlation_id="c-1",
        headers={"traceparent": "t", "x-reason": "Old"},
    )
    message = await eventually(lambda: take_unsettled(channel))
    await message.reject()

    for reason in ("Old", "rejected"):  # by RabbitMQ
        await eventually(lambda: holds(channel, NOTIFICATIONS.dead_letters, 1))
        [letter] = (await listing_of(worker_settings)).letters
        assert letter.reason == reason
        await command(worker_settings, "dead-letters", "redrive", QUEUE)
        back = await eventually(partial(take_unsettled, channel))
        back.headers.pop("x-delivery-count", None)  # added by the broker on delivery
        assert back.headers == {"traceparent": "t"}
        assert (back.body, back.message_id, back.type) == (b"body", "m-1", "request.created")
        assert (back.content_type, back.correlation_id) == ("application/json", "c-1")
        assert back.delivery_mode == DeliveryMode.PERSISTENT
        await back.reject()


async def take_unsettled(channel: AbstractChannel) -> Any:
    """Get a message of the live queue without acknowledging it."""
    return await (await channel.get_queue(QUEUE)).get(fail=False)


async def test_redriven_message_reaches_no_other_queue_not_even_one_named_in_its_headers(
    worker_settings, channel
):
    theirs = await channel.declare_queue(exclusive=True)
    await theirs.bind(topology.REQUESTS, "#")
    await bury(channel, NOTIFICATIONS, b"body", headers={"CC": [theirs.name], "cc": "kept"})

    await command(worker_settings, "dead-letters", "redrive", QUEUE)

    back = await eventually(lambda: take_unsettled(channel))
    assert {name: back.headers.get(name) for name in ("CC", "cc")} == {"CC": None, "cc": "kept"}
    assert await take(theirs) is None


async def test_dead_letters_that_cannot_be_decoded_are_listed_and_not_redriven(worker_settings, channel):
    await bury_undecodable(channel)
    ids = await bury_many(channel, 20)

    listing = await listing_of(worker_settings, "--limit", "100")
    [first] = (await listing_of(worker_settings, "--position", "1")).letters
    answer = await command(worker_settings, "dead-letters", "redrive", QUEUE)

    assert len(listing.letters) == len(RAW) + 20
    assert first.headers is not None
    assert first.headers[UNDECODABLE] == "content_type"
    assert answer.data == Redriven(QUEUE, 20, len(RAW), undecodable=len(RAW))
    assert await ids_in(channel, QUEUE, 20) == ids
    assert await count(channel, NOTIFICATIONS.dead_letters) == len(RAW)


@pytest.mark.parametrize("words", [("list",), ("redrive", QUEUE)])
async def test_command_that_reads_fewer_than_were_counted_fails(
    *, words, worker_settings, channel, monkeypatch
):
    monkeypatch.setattr(dead_letters, "ARRIVAL_SECONDS", 0.5)
    monkeypatch.setattr(dead_letters, "_count", lambda dead: 1 + (dead.declaration_result.message_count or 0))
    await bury_many(channel, 2)

    with pytest.raises(click.ClickException, match="of 3 messages did not arrive"):
        await command(worker_settings, "dead-letters", *words)


async def test_full_live_queue_stops_a_redrive_without_loss(worker_settings, channel):
    ids = await bury_many(channel, 30)
    await channel.queue_delete(QUEUE)
    arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-max-length": 3, "x-overflow": "reject-publish"}
    await channel.declare_queue(QUEUE, durable=True, arguments=arguments)

    with pytest.raises(click.ClickException, match="missing or full"):
        await command(worker_settings, "dead-letters", "redrive", QUEUE)

    moved = await count(channel, QUEUE)
    assert moved >= 3
    assert await ids_in(channel, QUEUE, moved) == ids[:moved]
    assert await ids_in(channel, NOTIFICATIONS.dead_letters, 30 - moved) == ids[moved:]


@pytest.mark.parametrize("marker", [b"notifications.dead-letters", b"message-0"])
async def test_broker_that_stops_answering_is_an_error_in_time(
    *, marker, worker_settings, broker_link, channel, monkeypatch
):
    monkeypatch.setattr(dead_letters, "ANSWER_SECONDS", 0.5)
    await bury_many(channel, 3)
    broker_link.hold_before(marker)
    settings = settings_with(worker_settings, amqp_url=broker_link.url)

    async with asyncio.timeout(10):
        with pytest.raises(BrokerUnavailable):
            await command(settings, "dead-letters", "redrive", QUEUE)


async def test_missing_queue_is_named(worker_settings, channel):
    await channel.queue_delete(NOTIFICATIONS.dead_letters)

    with pytest.raises(click.ClickException, match=r"notifications\.dead-letters: no such queue"):
        await command(worker_settings, "dead-letters", "list", QUEUE)


@pytest.fixture
async def buried(database, channel):
    """Requests whose request.created was dead-lettered."""
    requests = [await store(database) for _ in range(5)]
    for request in requests:
        await bury(channel, NOTIFICATIONS, created_body(request), message_id=key_of(request))
    return requests


async def test_redriven_messages_are_on_record_under_the_requests_that_they_name(
    worker_settings, channel, database, buried
):
    await bury(channel, NOTIFICATIONS, b"malformed", message_id=key_of(buried[0]))
    other = await store(database)
    await bury(channel, NOTIFICATIONS, created_body(other), message_id="ada@customer.example.com")
    words = ("dead-letters", "redrive", QUEUE, "--by", "Ada", "--note", "a mended handler")

    answer = await command(worker_settings, *words)

    assert answer.data == Redriven(QUEUE, 7, 0, 0)
    subjects = {request.id: key_of(request) for request in buried} | {other.id: None}
    for request_id, subject in subjects.items():
        [action] = await operator_actions.read(database, request_id)
        assert (action.action, action.subject) == ("dead-letters redrive", subject)
        assert (action.operator, action.note) == ("Ada", "a mended handler")
    shown = (await command(worker_settings, "trace", buried[0].uuid)).text
    assert f"{key_of(buried[0])}, by Ada: a mended handler" in shown


async def test_crash_between_confirm_and_acknowledgement_leaves_a_message_in_both_queues_and_on_record(
    worker_settings, channel, database, broker_link, buried
):
    ids = [key_of(request) for request in buried]
    broker_link.hold_before(b"\x00\x3c\x00\x50")  # basic.ack
    away = settings_with(worker_settings, amqp_url=broker_link.url)
    redriving = asyncio.create_task(command(away, "dead-letters", "redrive", QUEUE))
    await eventually(broker_link.marker_reached.is_set)
    await broker_link.cut()
    with pytest.raises(BrokerUnavailable):
        await redriving

    assert await ids_in(channel, QUEUE, 1) == ids[:1]
    assert await ids_in(channel, NOTIFICATIONS.dead_letters, 5) == ids
    assert ids[0] in await database.fetchval("SELECT array_agg(subject) FROM operator_action")
