"""Events of any size, as RabbitMQ gets them."""

import pytest

from tests.worker.conftest import outbox_event, take_all

_FRAME_BYTES = 131_072  # RabbitMQ's limit of a frame; also our limit of a message


@pytest.mark.parametrize("size", [0, 1, _FRAME_BYTES - 8, _FRAME_BYTES - 7, _FRAME_BYTES])
async def test_body_of_any_size_arrives_whole(publisher, tap, size):
    event = outbox_event(1, payload=b"x" * size)

    await publisher.publish([event, outbox_event(2)])

    assert [len(message.body) for message in await take_all(tap)] == [size, 2]
