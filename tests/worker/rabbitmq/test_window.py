"""Events as RabbitMQ gets them, and the attributes of aiormq that the relay uses."""

from dataclasses import fields
from typing import cast

import aiormq
import pytest
from aiormq.abc import ChannelFrame

from service.identifiers import uuid_of
from tests.worker.conftest import TRACEPARENT, outbox_row, take_all
from worker.rabbitmq.connection import open_channel

_FRAME_BYTES = 131_072  # RabbitMQ's limit of a frame; also our limit of a message


async def test_aiormq_has_the_undocumented_attributes_that_the_relay_uses(worker_settings):
    async with open_channel(worker_settings, name="test") as opened:
        channel = cast("aiormq.Channel", await opened.get_underlay_channel())

        assert (channel.confirmations, channel.message_id_delivery_tag) == ({}, {})
        assert (channel.delivery_tag, channel.max_content_size) == (0, _FRAME_BYTES - 8)
        assert channel.write_queue.empty()
        assert not channel.closing.done()
        async with channel.lock:
            assert not channel.is_closed
    assert [field.name for field in fields(ChannelFrame)] == ["payload", "should_close", "drain_future"]


@pytest.mark.parametrize("traceparent", [None, TRACEPARENT])
async def test_event_is_published_with_its_attributes(publisher, tap, traceparent):
    event = outbox_row(40_000, payload=b"{}", traceparent=traceparent)

    await publisher.publish([event])

    (message,) = await take_all(tap)
    assert message.headers == {
        "cloudEvents:specversion": "1.0",
        "cloudEvents:id": event.event_id,
        "cloudEvents:source": "/calculation-requests",
        "cloudEvents:type": event.type,
        "cloudEvents:subject": uuid_of(event.request_id),
        "sequence": event.sequence,
    } | ({} if traceparent is None else {"traceparent": traceparent})
    assert (message.content_type, message.delivery_mode) == ("application/cloudevents+json", 2)
    assert (message.message_id, message.type) == (event.event_id, event.type)
    assert message.timestamp == event.created_at.replace(microsecond=0)
    assert (message.routing_key, message.body) == (event.type, event.payload)


@pytest.mark.parametrize("size", [0, 1, _FRAME_BYTES - 8, _FRAME_BYTES - 7, _FRAME_BYTES])
async def test_body_of_any_size_arrives_whole(publisher, tap, size):
    event = outbox_row(1, payload=b"x" * size)

    await publisher.publish([event, outbox_row(2)])

    assert [len(message.body) for message in await take_all(tap)] == [size, 2]
