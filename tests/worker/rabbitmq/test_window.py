"""Events as RabbitMQ gets them, and the attributes of aiormq that the relay uses."""

from dataclasses import fields
from typing import cast

import aiormq
import pytest
from aiormq.abc import ChannelFrame

from tests.worker.conftest import outbox_event, take_all
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


@pytest.mark.parametrize("size", [0, 1, _FRAME_BYTES - 8, _FRAME_BYTES - 7, _FRAME_BYTES])
async def test_body_of_any_size_arrives_whole_without_a_header_for_a_trace_that_it_has_not(
    publisher, tap, size
):
    await publisher.publish([outbox_event(1, payload=b"x" * size), outbox_event(2)])

    taken = await take_all(tap)
    assert [len(message.body) for message in taken] == [size, 2]
    assert "traceparent" not in taken[0].headers
