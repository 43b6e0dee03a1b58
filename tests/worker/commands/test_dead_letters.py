"""`dead-letters list|redrive`: reading removes nothing, and messages move back."""

import asyncio
import os
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
from aio_pika import DeliveryMode
from aio_pika.abc import AbstractChannel

from deploy.local.machine.folders import Place
from deploy.local.servers.rabbitmq_node import rabbitmq_node
from deploy.local.servers.server import trouble_of_rabbitmq
from service.identifiers import new_request_id, uuid_of
from tests.harness.queues import UNDECODABLE, RawMessage, count, declare_topology, holds, open_channel
from tests.harness.servers import KillableBroker
from tests.harness.waiting import eventually
from tests.worker.commands.conftest import command
from tests.worker.conftest import publish, take_all, take_ids
from tests.worker.steps import bury
from worker.commands import dead_letters
from worker.rabbitmq import message_properties, topology
from worker.rabbitmq.connection import BrokerUnavailable
from worker.rabbitmq.topology import NOTIFICATIONS

pytestmark = pytest.mark.usefixtures("on_servers")

QUEUE = NOTIFICATIONS.name
DEAD = NOTIFICATIONS.dead_letters


async def bury_many(channel: AbstractChannel, number: int) -> list[str]:
    """Dead-letter messages of the notifications. Returns their ids."""
    ids, headers = [f"message-{position}" for position in range(number)], {"x-reason": "unknown"}
    for each in ids:
        await bury(channel, NOTIFICATIONS, b"{}", message_id=each, headers=headers)
    return ids


async def ids_in(channel: AbstractChannel, queue: str, number: int) -> list[str | None]:
    await eventually(lambda: holds(channel, queue, number))
    return [message.message_id for message in await take_all(await channel.get_queue(queue))]


async def listing_of(*words: str) -> dict[str, Any]:
    answer = await command("dead-letters", "list", QUEUE, *words)
    listings: list[dict[str, Any]] = answer.data
    return listings[0]


async def test_letter_is_listed_with_reason_and_checked_sender_or_shown_in_full(channel, worker_settings):
    """Of a message that RabbitMQ dead-letters, x-user-id may be the sender's own words."""
    user, uuid = urlsplit(worker_settings.amqp_url).username, uuid_of(new_request_id())
    headers: dict[str, Any] = {"x-reason": 7, "x-reason-text": "data.uuid: unknown", "x-death": ["odd", {}]}
    body = b'{"customer": "ada@customer.example.com\x1b[2J"}\xff'
    await bury(channel, NOTIFICATIONS, b"first", message_id="m-1")
    died = {"x-first-death-reason": "maxlen"}
    await bury(channel, NOTIFICATIONS, b"{}", message_id="m-1", user_id=user, headers=died)
    for sent in ({"x-user-id": "team"}, {"x-user-id": "eve", "x-first-death-reason": "delivery_limit"}):
        await bury(channel, NOTIFICATIONS, f'{{"uuid": "{uuid}"}}'.encode(), message_id="m-1", headers=sent)
    await bury(channel, NOTIFICATIONS, body, message_id="m-2", type="request.created", headers=headers)

    listed = await listing_of()
    shown = (await command("dead-letters", "list", QUEUE, "--full")).text

    assert [tuple(letter.values()) for letter in listed["letters"]] == [
        ("m-1", None, None, None, None, None),
        ("m-1", None, None, user, "maxlen", None),
        ("m-1", uuid, None, "team", None, None),
        ("m-1", uuid, None, None, "delivery_limit", None),
        ("m-2", None, "request.created", None, "7", "data.uuid: unknown"),
    ]
    assert "x-reason: 7" in shown
    assert shown.endswith('{"customer": "ada@customer.example.com\\x1b[2J"}\\xff')


async def test_many_are_listed_and_redriven_which_is_on_record(channel, database):
    ids = await bury_many(channel, 300)

    listings = [await listing_of("--limit", limit) for limit in ("7", "7", "300")]
    answer = await command("dead-letters", "redrive", QUEUE)

    for listing, number in zip(listings, (7, 7, 300), strict=True):
        assert listing["count"] == 300
        assert [letter["message_id"] for letter in listing["letters"]] == ids[:number]
    assert answer.data == {"queue": QUEUE, "messages": 300, "missing": []}
    assert sorted(await ids_in(channel, QUEUE, 300), key=str) == sorted(ids)
    assert await count(channel, DEAD) == 0
    records = await database.fetch("SELECT request_id, subject FROM operator_action")
    assert records == [(None, f"{QUEUE}: all 300")]


async def test_letters_are_redriven_and_discarded_by_id_and_reason_and_the_others_stay(channel, database):
    for position in range(9):
        headers: dict[str, Any] = {"x-reason": "Malformed" if position % 3 else "RequestNotFound"}
        await bury(channel, NOTIFICATIONS, b"{}", message_id=f"m-{position}", headers=headers)
    of = ("dead-letters", "discard", QUEUE, "--reason", "Malformed")
    no_utf8 = os.fsdecode(b"\xff")  # as Python reads it from the command line

    by_reason = await command("dead-letters", "redrive", QUEUE, "--reason", "RequestNotFound")
    by_both = await command(*of, "--message-id", "m-1", "--message-id", "m-0")
    by_id = await command("dead-letters", "redrive", QUEUE, "--message-id", "m-8")
    by_odd_id = await command("dead-letters", "discard", QUEUE, "--message-id", no_utf8)
    left = {letter["message_id"] for letter in (await listing_of())["letters"]}
    rest, nothing = await command(*of), await command(*of)

    assert (by_reason.status, by_reason.data["messages"]) == (0, 3)
    assert (by_both.status, by_both.data["messages"], by_both.data["missing"]) == (1, 1, ["m-0"])
    assert by_both.text == "1 of 6 messages discarded; none that meets all conditions has m-0"
    assert (by_id.status, by_odd_id.status, by_odd_id.data["messages"]) == (0, 1, 0)
    assert left == {"m-2", "m-4", "m-5", "m-7"}
    assert (rest.data["messages"], nothing.status, nothing.data["missing"]) == (4, 1, ["Malformed"])
    assert sorted(await ids_in(channel, QUEUE, 4), key=str) == ["m-0", "m-3", "m-6", "m-8"]
    subjects = [row[0] for row in await database.fetch("SELECT subject FROM operator_action ORDER BY id")]
    chosen = ("RequestNotFound", "m-1, m-0, Malformed", "m-8", "\\udcff")
    assert subjects[:4] == [f"{QUEUE}: {each}" for each in chosen]


@pytest.mark.long
async def test_rabbitmq_that_starts_again_has_just_the_letters_that_were_not_chosen(tmp_path):
    """It then replays the queue's log, in which letters were read, returned and acknowledged."""
    with rabbitmq_node(Place(folder=tmp_path)) as node:
        os.environ["AMQP_URL"] = node.url
        broker = KillableBroker(node, trouble_of_rabbitmq)
        async with open_channel(node.url) as channel:
            await declare_topology(channel)
            left = set(await bury_many(channel, 300))
            for start in range(3):
                chosen = [f"message-{position}" for position in range(start, 300, 7)]
                of_ids = (word for each in chosen for word in ("--message-id", each))
                assert (await command("dead-letters", "discard", QUEUE, *of_ids)).status == 0
                left -= set(chosen)
                await eventually(partial(holds, channel, DEAD, len(left)))

        await broker.kill()
        await broker.start()
        async with open_channel(node.url) as channel:
            assert set(await ids_in(channel, DEAD, len(left))) == left


async def test_redriven_message_is_as_it_was_before_it_died_and_reaches_no_other_queue(channel, tap):
    properties: dict[str, Any] = {"message_id": "m-1", "type": "request.created"}
    properties |= {"content_type": "application/json", "correlation_id": "c-1"}
    headers = {"traceparent": "t", "x-reason": "Old"}
    await publish(channel, NOTIFICATIONS, b"body", headers=headers, **properties)
    get_one = partial((await channel.get_queue(QUEUE)).get, fail=False)
    await (await eventually(get_one)).reject()

    for reason in ("Old", "rejected"):  # by RabbitMQ
        await eventually(lambda: holds(channel, DEAD, 1))
        [letter] = (await listing_of())["letters"]
        assert letter["reason"] == reason
        await command("dead-letters", "redrive", QUEUE)
        back = await eventually(get_one)
        back.headers.pop("x-delivery-count", None)  # added by the broker on delivery
        assert (back.headers, back.body) == ({"traceparent": "t"}, b"body")
        assert {each: getattr(back, each) for each in properties} == properties
        assert back.delivery_mode == DeliveryMode.PERSISTENT
        await back.reject()
    assert len(await take_all(tap)) == 1  # from its sender


async def test_dead_letters_that_cannot_be_decoded_are_redriven_and_named_as_such(channel):
    """So their consumer refuses them again."""
    exchange = await channel.get_exchange(topology.DEAD_LETTERS)
    for name, written in UNDECODABLE.values():
        await exchange.publish(RawMessage(b"{}", name, written), DEAD, mandatory=True)

    first, *_ = (await listing_of("--full"))["letters"]
    await command("dead-letters", "redrive", QUEUE)

    assert first["headers"][message_properties.UNDECODABLE] == "content_type"
    await eventually(lambda: holds(channel, QUEUE, len(UNDECODABLE)))
    moved = await take_all(await channel.get_queue(QUEUE))
    assert all(message_properties.UNDECODABLE in message.headers for message in moved)


async def test_letter_that_another_reader_takes_meanwhile_is_missed(channel, broker_link, monkeypatch):
    monkeypatch.setattr(dead_letters, "ARRIVAL_SECONDS", 0.5)
    await bury_many(channel, 2)
    broker_link.hold_before(b"\x00\x3c\x00\x14")  # basic.consume, after the letters were counted
    os.environ["AMQP_URL"] = broker_link.url
    redriving = asyncio.create_task(command("dead-letters", "redrive", QUEUE))
    await eventually(broker_link.marker_reached.is_set)
    await (await channel.get_queue(DEAD)).get()
    broker_link.resume()

    with pytest.raises(click.ClickException, match="1 of 2 messages did not arrive"):
        await redriving


@pytest.mark.parametrize("words", [(), ("--reason", "unknown")])
async def test_full_live_queue_stops_a_redrive_without_loss(channel, words):
    ids = await bury_many(channel, 30)
    await channel.queue_delete(QUEUE)
    arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-max-length": 3, "x-overflow": "reject-publish"}
    await channel.declare_queue(QUEUE, durable=True, arguments=arguments)

    with pytest.raises(click.ClickException, match="missing or full"):
        await command("dead-letters", "redrive", QUEUE, *words)

    moved = await count(channel, QUEUE)
    assert moved >= 3
    assert await ids_in(channel, QUEUE, moved) == ids[:moved]
    assert await ids_in(channel, DEAD, 30 - moved) == ids[moved:]


async def test_missing_live_queue_stops_a_redrive_without_loss(channel):
    ids = await bury_many(channel, 1)
    await channel.queue_delete(QUEUE)

    with pytest.raises(click.ClickException, match="missing or full"):
        await command("dead-letters", "redrive", QUEUE)

    assert await ids_in(channel, NOTIFICATIONS.dead_letters, 1) == ids


async def test_crash_before_acknowledgements_leaves_messages_in_both_queues(channel, broker_link):
    ids = await bury_many(channel, 5)
    broker_link.hold_before(b"\x00\x3c\x00\x50")  # basic.ack
    os.environ["AMQP_URL"] = broker_link.url
    redriving = asyncio.create_task(command("dead-letters", "redrive", QUEUE))
    await eventually(broker_link.marker_reached.is_set)
    await broker_link.cut()
    with pytest.raises(BrokerUnavailable):
        await redriving

    assert await ids_in(channel, DEAD, 5) == ids
    moved = await take_ids(await channel.get_queue(QUEUE))
    assert moved == ids[: len(moved) or 1]  # and perhaps others, published before the connection broke
