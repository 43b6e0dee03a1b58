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

    failed = {"2": "refused by the broker"}
    assert at_first == PublishResult(frozenset("1"), failed | {"3": "returned: no queue is bound for it"})
    assert without_refusal == PublishResult(frozenset("13"))
    assert later == PublishResult(frozenset("3"), failed)


@pytest.mark.usefixtures("channel")  # It declares the topology.
async def test_event_that_cannot_be_encoded_takes_no_delivery_tag_and_settled_ones_no_memory(
    worker_settings, tap
):
    good = [outbox_event(number) for number in (1, 3, 5)]
    bad = [outbox_event(2, type="x" * 300), outbox_event(4, type="\ud800")]
    async with open_channel(worker_settings, name="test") as opened:
        underlay = cast("aiormq.Channel", await opened.get_underlay_channel())

        outcome = await Publisher(underlay, timeout_seconds=10.0).publish(
            sorted(good + bad, key=lambda event: event.event_id)
        )

        assert (dict(underlay.confirmations), underlay.message_id_delivery_tag) == ({}, {})
    assert (outcome.confirmed, outcome.outage) == (frozenset("135"), None)
    reasons = {event_id: reason.partition(":")[0] for event_id, reason in outcome.failed.items()}
    assert reasons == dict.fromkeys("24", "refused by AMQP")
    assert await take_ids(tap) == [event.event_id for event in good]


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


async def test_publisher_on_a_closed_channel_reports_an_outage(publisher, channel):
    await channel.exchange_delete(topology.REQUESTS)
    await publisher.publish([outbox_event(1)])

    outcome = await publisher.publish([outbox_event(2)])

    assert (outcome.confirmed, outcome.failed, outcome.outage is None) == (frozenset(), {}, False)
