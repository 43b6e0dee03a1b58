"""The outcome of publishing a window: events confirmed, events that failed, or an outage."""

import asyncio
from typing import cast

import aiormq
import pytest

from tests.harness.queues import declare_topology
from tests.worker.conftest import outbox_event, settings_with, take_ids
from tests.worker.relay.conftest import bind_full_queue
from worker.rabbitmq import topology
from worker.rabbitmq.connection import open_channel
from worker.relay.publisher import Publisher


async def test_refused_and_returned_events_fail_alone_and_the_publisher_can_still_be_used(publisher, channel):
    await bind_full_queue(channel, "request.calculated")
    await channel.queue_delete(topology.NOTIFICATIONS.name)

    window = [
        outbox_event(2),
        outbox_event(3, type="request.created"),
        outbox_event(4, type="request.email_sent"),
    ]
    with_failures = await publisher.publish(window)
    await declare_topology(channel)
    afterwards = await publisher.publish([outbox_event(5), outbox_event(6, type="request.created")])

    assert with_failures.confirmed == {"4"}
    assert with_failures.failed == {"2": "refused by the broker", "3": "returned: no queue is bound for it"}
    assert afterwards.confirmed == {"6"}
    assert afterwards.failed == {"5": "refused by the broker"}
    assert with_failures.outage is afterwards.outage is None


async def test_channel_on_which_events_are_refused_is_replaced_after_some_seconds(
    publisher, channel, monkeypatch
):
    await bind_full_queue(channel, "request.calculated")

    await publisher.publish([outbox_event(1)])
    usable_at_first = publisher.is_usable
    monkeypatch.setattr("worker.relay.publisher._REFUSING_SECONDS", 0.0)
    await publisher.publish([outbox_event(2, type="request.email_sent")])
    usable_without_refusal = publisher.is_usable
    await publisher.publish([outbox_event(3)])

    assert (usable_at_first, usable_without_refusal, publisher.is_usable) == (True, True, False)


async def test_event_that_cannot_be_encoded_takes_no_delivery_tag(publisher, tap):
    good = [outbox_event(number) for number in (1, 3, 5)]
    bad = [outbox_event(2, type="x" * 300), outbox_event(4, type="\ud800")]

    outcome = await publisher.publish(sorted(good + bad, key=lambda event: event.event_id))

    assert outcome.confirmed == {"1", "3", "5"}
    assert {reason.partition(":")[0] for reason in outcome.failed.values()} == {"refused by AMQP"}
    assert set(outcome.failed) == {"2", "4"}
    assert outcome.outage is None
    assert await take_ids(tap) == [event.event_id for event in good]


@pytest.mark.usefixtures("channel")  # It declares the topology.
async def test_settled_events_leave_nothing_in_the_memory_of_the_channel(worker_settings):
    window = [outbox_event(1), outbox_event(2, type="request.email_sent"), outbox_event(3, type="x" * 300)]
    async with open_channel(worker_settings, name="test") as opened:
        underlay = cast("aiormq.Channel", await opened.get_underlay_channel())

        outcome = await Publisher(underlay, timeout_seconds=10.0).publish(window)

        assert outcome.confirmed == {"1", "2"}
        assert (dict(underlay.confirmations), underlay.message_id_delivery_tag) == ({}, {})


async def test_writing_and_confirming_share_one_timeout(worker_settings, broker_link):
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

        broker_link.resume()
    assert isinstance(outcome.outage, TimeoutError)


async def test_publisher_on_a_closed_channel_reports_an_outage(publisher, channel):
    await channel.exchange_delete(topology.REQUESTS)
    await publisher.publish([outbox_event(1)])

    outcome = await publisher.publish([outbox_event(2)])

    assert (outcome.confirmed, outcome.failed) == (frozenset(), {})
    assert outcome.outage is not None
