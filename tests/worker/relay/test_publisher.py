"""The outcome of publishing a window: events confirmed, events that failed, or an outage."""

import asyncio
from datetime import UTC, datetime
from typing import cast

import aiormq
import pytest
from aiormq.exceptions import ChannelNotFoundEntity

from service.identifiers import new_request_id
from tests.harness.queues import count, declare_topology
from tests.harness.waiting import eventually
from tests.worker.conftest import ANY_EVENT, bind_tap, open_publisher, settings_with, take_ids
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BrokerUnavailable, open_channel
from worker.relay.outbox_tables import OutboxRow
from worker.relay.publisher import Publisher


def row(number: int, *, event_type: str = "request.calculated", payload: bytes = b"{}") -> OutboxRow:
    """Return an event; each has its own request."""
    return OutboxRow(
        lane=0,
        id=number,
        request_id=new_request_id(),
        type=event_type,
        sequence=number,
        traceparent=None,
        payload=payload,
        created_at=datetime.now(UTC),
        attempts=0,
        must_wait=False,
    )


@pytest.fixture
async def held_publisher(worker_settings, broker_link):
    """A publisher with a long timeout, whose connection to the broker the test can hold."""
    settings = settings_with(worker_settings, amqp_url=broker_link.url, broker_timeout_seconds=30.0)
    async with open_publisher(settings) as opened:
        yield opened
        broker_link.resume()


async def test_every_event_of_a_window_is_confirmed(publisher, tap):
    window = [row(number) for number in range(1, 101)]

    outcome = await publisher.publish(window)

    assert (len(outcome.confirmed), outcome.failed, outcome.outage) == (100, {}, None)
    assert await take_ids(tap) == [event.event_id for event in window]


async def test_refused_and_returned_events_fail_alone_and_the_publisher_can_still_be_used(publisher, channel):
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    await bind_tap(channel, "request.calculated", arguments=full)
    await channel.queue_delete(topology.NOTIFICATIONS.name)
    await publisher.publish([row(1)])

    window = [row(2), row(3, event_type="request.created"), row(4, event_type="request.email_sent")]
    with_failures = await publisher.publish(window)
    await declare_topology(channel)
    afterwards = await publisher.publish([row(5), row(6, event_type="request.created")])

    assert with_failures.confirmed == {4}
    assert with_failures.failed == {
        2: "refused by the broker",
        3: "returned: no queue is bound for it",
    }
    assert afterwards.confirmed == {6}
    assert afterwards.failed == {5: "refused by the broker"}
    assert with_failures.outage is afterwards.outage is None


async def test_event_that_cannot_be_encoded_takes_no_delivery_tag(publisher, tap):
    window = [row(1), row(2, event_type="x" * 300), row(3), row(4, event_type="\ud800"), row(5)]

    outcome = await publisher.publish(window)

    assert outcome.confirmed == {1, 3, 5}
    assert set(outcome.failed) == {2, 4}
    assert outcome.unencodable == {2, 4}
    assert outcome.failed[2] == "unencodable: longer than 255 bytes"
    assert outcome.outage is None
    assert await take_ids(tap) == [window[index].event_id for index in (0, 2, 4)]


async def test_no_confirm_in_time_is_an_outage(worker_settings, broker_link):
    settings = settings_with(worker_settings, amqp_url=broker_link.url)
    async with open_channel(settings, name="test") as channel:
        publisher = await Publisher.on(channel, timeout_seconds=0.2)
        broker_link.hold()

        outcome = await publisher.publish([row(1), row(2)])

        broker_link.resume()
    assert (outcome.confirmed, outcome.failed) == (frozenset(), {})
    assert isinstance(outcome.outage, BrokerUnavailable)


async def test_writing_and_confirming_share_one_timeout(worker_settings, broker_link):
    settings = settings_with(worker_settings, amqp_url=broker_link.url)
    async with open_channel(settings, name="test") as channel:
        underlay = cast("aiormq.Channel", await channel.get_underlay_channel())
        publisher = Publisher(underlay, timeout_seconds=1.0)
        broker_link.hold()

        async with underlay.lock:
            publishing = asyncio.create_task(publisher.publish([row(1)]))
            await asyncio.sleep(0.6)
        async with asyncio.timeout(0.8):
            outcome = await publishing

        broker_link.resume()
    assert isinstance(outcome.outage, BrokerUnavailable)


async def test_channel_closed_by_the_broker_is_an_outage_and_confirmed_events_are_reported(
    held_publisher, broker_link, channel
):
    queue = await channel.declare_queue(exclusive=True)
    await queue.bind(topology.REQUESTS, ANY_EVENT)
    confirmed, refused = row(1), row(2)
    broker_link.hold_before(refused.event_id.encode())
    publishing = asyncio.create_task(held_publisher.publish([confirmed, refused]))
    await eventually(lambda: count(channel, queue.name))

    await channel.exchange_delete(topology.REQUESTS)
    broker_link.resume()
    outcome = await publishing

    assert outcome.confirmed == {1}
    assert outcome.failed == {}
    assert isinstance(outcome.outage, ChannelNotFoundEntity)


async def test_publisher_on_a_closed_channel_reports_an_outage(publisher, channel):
    await channel.exchange_delete(topology.REQUESTS)
    await publisher.publish([row(1)])

    outcome = await publisher.publish([row(2)])

    assert (outcome.confirmed, outcome.failed) == (frozenset(), {})
    assert outcome.outage is not None


async def test_cancelled_publish_leaves_nothing_running(held_publisher, broker_link):
    broker_link.hold()
    tasks_before = asyncio.all_tasks()
    publishing = asyncio.create_task(held_publisher.publish([row(1), row(2)]))
    await eventually(lambda: len(asyncio.all_tasks() - tasks_before) >= 2)

    publishing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await publishing
    await eventually(lambda: asyncio.all_tasks() <= tasks_before)


async def test_connection_lost_while_a_window_is_written_is_noticed_at_once(held_publisher, broker_link):
    broker_link.hold()
    window = [row(number, payload=b"x" * 100_000) for number in range(500)]
    publishing = asyncio.create_task(held_publisher.publish(window))
    await asyncio.sleep(0)  # Start it, and fill the buffers.

    await broker_link.cut()
    async with asyncio.timeout(20):  # less than the publisher's own timeout
        outcome = await publishing

    assert outcome.outage is not None
