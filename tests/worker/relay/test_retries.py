"""Events that RabbitMQ does not confirm fail alone, are held, and are retried without delaying the others."""

import asyncio
import time
from typing import cast

import aiormq
import pytest

from tests.harness.queues import declare_topology
from tests.harness.stored import FILL_OUTBOX
from tests.worker.conftest import announce_next, hold_events, outbox_event, settings_with, store, take_ids
from tests.worker.steps import bind_full_queue, id_of
from worker.rabbitmq import topology
from worker.rabbitmq.connection import open_channel
from worker.relay import loop, pointers
from worker.relay.publisher import Publisher, PublishResult


async def test_refused_and_returned_events_fail_alone_and_some_seconds_later_replace_the_channel(
    publisher, channel, monkeypatch
):
    await bind_full_queue(channel, "request.calculated")
    await channel.queue_delete(topology.NOTIFICATIONS.name)
    good, refused = outbox_event(1, type="request.email_sent"), outbox_event(2)
    created = outbox_event(3, type="request.created")

    at_first = await publisher.publish([good, refused, created])
    assert publisher.is_usable
    await declare_topology(channel)
    monkeypatch.setattr("worker.relay.publisher._REFUSING_SECONDS", 0.0)
    without_refusal = await publisher.publish([good, created])
    assert publisher.is_usable
    later = await publisher.publish([refused, created])
    assert not publisher.is_usable
    await channel.exchange_delete(topology.REQUESTS)
    on_closed_channel = [await publisher.publish([good]) for _ in range(2)]

    failed = {"2": "refused by the broker"}
    assert at_first == PublishResult(frozenset("1"), failed | {"3": "returned: no queue is bound for it"})
    assert without_refusal == PublishResult(frozenset("13"))
    assert later == PublishResult(frozenset("3"), failed)
    assert on_closed_channel == [
        PublishResult(outage=each.outage) for each in on_closed_channel if each.outage
    ]


@pytest.mark.usefixtures("channel")  # It declares the topology.
async def test_event_that_cannot_be_encoded_takes_no_delivery_tag_and_settled_ones_no_memory(
    worker_settings, tap
):
    types = {1: "a", 2: "x" * 300, 3: "a", 4: "\ud800", 5: "a"}
    window = [outbox_event(number, type=f"request.{name}") for number, name in types.items()]
    async with open_channel(worker_settings, name="test") as opened:
        underlay = cast("aiormq.Channel", await opened.get_underlay_channel())

        outcome = await Publisher(underlay, timeout_seconds=10.0).publish(window)

        assert (dict(underlay.confirmations), underlay.message_id_delivery_tag) == ({}, {})
    assert (outcome.confirmed, outcome.outage) == (frozenset("135"), None)
    reasons = {event_id: reason.partition(":")[0] for event_id, reason in outcome.failed.items()}
    assert reasons == dict.fromkeys("24", "refused by AMQP")
    assert await take_ids(tap) == ["1", "3", "5"]


async def test_writing_and_confirming_share_one_timeout_after_which_the_channel_is_not_used_again(
    worker_settings, broker_link
):
    """Otherwise the numbers of later messages could be wrong, and events could be deleted unpublished."""
    settings = settings_with(worker_settings, amqp_url=broker_link.url)
    async with open_channel(settings, name="test") as channel:
        underlay = cast("aiormq.Channel", await channel.get_underlay_channel())
        publisher = Publisher(underlay, timeout_seconds=1.0)
        broker_link.hold()

        async with underlay.lock:
            publishing = asyncio.create_task(publisher.publish([outbox_event(1)]))
            await asyncio.sleep(0.6)
        async with asyncio.timeout(0.8):
            outcome = await publishing

        assert (type(outcome.outage), publisher.is_usable) == (TimeoutError, False)
        broker_link.resume()


@pytest.fixture
async def refusing(channel):
    """A queue of another team that refuses request.created, while notifications and the tap take it."""
    return await bind_full_queue(channel, "request.created")


async def make_due(database) -> None:
    await database.execute("UPDATE outbox SET next_attempt_at = now() WHERE next_attempt_at IS NOT NULL")


@pytest.mark.parametrize(("attempts", "pause"), [(0, 100), (1, 200), (2, 300), (5000, 300)])
async def test_wait_of_a_refused_event_doubles_up_to_the_longest(database, attempts, pause):
    request = await store(database)
    await announce_next(database, request.id)
    # 2 ^ 5000 is no double.
    await database.execute("UPDATE outbox SET attempts = $1 WHERE sequence = 1", attempts)

    await hold_events(database, request.id)
    await announce_next(database, request.id)

    rows = await database.fetch("SELECT attempts, next_attempt_at - now() FROM outbox ORDER BY sequence")
    held = [(row[0], round(row[1].total_seconds())) for row in rows]
    assert held == [(attempts + 1, pause), (0, pause), (0, pause)]


@pytest.mark.parametrize("is_confirmed", [True, False])
async def test_later_event_that_a_person_has_locked_delays_no_pass(
    relay_once, database, other_connection, stored_request, tap, channel, is_confirmed
):
    await announce_next(database, stored_request.id)
    if is_confirmed:
        await hold_events(database, stored_request.id)
        await make_due(database)
    else:
        await bind_full_queue(channel, "request.created")

    async with other_connection.transaction(), asyncio.timeout(2.0):
        await other_connection.execute("SELECT FROM outbox WHERE sequence = 2 FOR UPDATE")
        await relay_once()
        assert await take_ids(tap) == [id_of(stored_request)]


async def test_held_events_of_a_request_are_published_one_after_another(
    relay_once, database, stored_request, tap
):
    await announce_next(database, stored_request.id)
    await hold_events(database, stored_request.id)
    await make_due(database)

    assert [await relay_once() for _ in range(3)] == [1, 1, 0]
    ids = await take_ids(tap)
    assert [str(each).rpartition(".")[2] for each in ids] == ["1", "2"]


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("is_confirmed", [True, False])
async def test_event_that_is_written_while_the_one_before_it_is_settled_follows_it(
    relay_once, database, other_connection, stored_request, tap, channel, is_confirmed, is_held, monkeypatch
):
    """Neither transaction sees what the other has written."""
    monkeypatch.setattr(loop, "_RETRY_SECONDS", 0.0001)
    monkeypatch.setattr(loop, "_FAILED_RETRY_SECONDS", 0.0)
    if is_held:
        await hold_events(database, stored_request.id)
        await make_due(database)
    refusing = None if is_confirmed else await bind_full_queue(channel, "request.created")

    async with other_connection.transaction():
        await announce_next(other_connection, stored_request.id)
        await relay_once()
    if refusing:
        await refusing.delete(if_empty=False)
    for _ in range(2):
        await relay_once()

    assert list(dict.fromkeys(await take_ids(tap))) == [
        id_of(stored_request),
        f"{stored_request.uuid}.request.email_sent.2",
    ]


@pytest.mark.usefixtures("refusing")
async def test_few_refused_events_are_retried_in_a_pass_in_turn_and_new_ones_sent_at_once(
    relay_once, database, tap, monkeypatch
):
    """Each attempt puts one more copy into every queue that takes the event."""
    monkeypatch.setattr(loop, "_RETRY_SECONDS", 0.0001)
    monkeypatch.setattr(loop, "_FAILED_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(loop, "_HELD_BATCH_SIZE", 2)
    old = {id_of(await store(database)) for _ in range(4)}
    await relay_once()
    copies = [await take_ids(tap)]
    new = id_of(await store(database))

    for _ in range(2):
        await relay_once()
        copies.append(await take_ids(tap))

    first, second, third = map(set, copies)
    assert [len(each) for each in copies] == [4, 1 + 2, 2]
    assert (first, second | third, new in second) == (old, {new} | old, True)


@pytest.mark.usefixtures("refusing")
async def test_failed_retries_are_at_most_a_hundred_a_second(relay_once, database, tap, monkeypatch):
    monkeypatch.setattr(loop, "_RETRY_SECONDS", 0.0001)
    for _ in range(20):
        await store(database)
    await relay_once()
    await take_ids(tap)
    began = time.monotonic()

    for _ in range(6):
        await store(database)
        await relay_once()

    retried = len(await take_ids(tap)) - 6
    assert 20 <= retried <= 20 + 100 * (time.monotonic() - began)


async def test_event_behind_a_refused_one_is_published_at_once_after_it_while_others_are_refused(
    relay_once, database, channel, refusing, monkeypatch
):
    monkeypatch.setattr(loop, "_RETRY_SECONDS", 3600.0)
    await bind_full_queue(channel, "request.email_sent")
    for request in [await store(database) for _ in range(10)]:
        await announce_next(database, request.id)
    await database.execute("UPDATE event SET type = 'request.calculated' WHERE sequence = 2")
    others = [(await store(database)).id for _ in range(25)]
    await database.execute("UPDATE event SET type = 'request.email_sent' WHERE request_id = ANY ($1)", others)
    await relay_once()
    await refusing.delete(if_empty=False)
    await make_due(database)

    for _ in range(4):
        await relay_once()

    held = await database.fetch("SELECT DISTINCT type FROM outbox JOIN event USING (request_id, sequence)")
    assert [row["type"] for row in held] == ["request.email_sent"]


async def test_events_that_wait_behind_a_held_one_do_not_slow_a_pass(database):
    """Measured in the rows that Postgres reads, with a plan made while the table was empty."""
    read_so_far = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'outbox'"
    async with database.transaction():
        await database.execute(pointers.SETTINGS)
        for _ in range(6):  # From the sixth on, Postgres keeps the plan.
            await pointers.lock(database, pending=2, held=2)
    await database.execute(FILL_OUTBOX, 1, b'{"data": {}}')
    await database.execute("UPDATE outbox SET attempts = 1, next_attempt_at = now()")
    await database.execute(
        """
        INSERT INTO outbox (request_id, sequence, attempts, next_attempt_at)
        SELECT md5((number % 16)::text)::uuid, number, (number <= 16)::integer, now() + interval '1 h'
          FROM generate_series(1, 20000) AS number
        """
    )
    await database.execute("SELECT pg_stat_force_next_flush()")  # Otherwise these rows would be counted too.

    async with database.transaction():
        await database.execute(pointers.SETTINGS)
        before = await database.fetchval(read_so_far)
        locked = await pointers.lock(database, pending=2, held=2)
        read = await database.fetchval(read_so_far) - before

    assert [(pointer.sequence, pointer.attempts) for pointer in locked] == [(1, 1)]
    assert read < 100
