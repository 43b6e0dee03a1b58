"""Data written in one turn of the event loop is sent in one call, in order, and none is lost."""

import asyncio
from unittest.mock import Mock, call

import pytest

from service.server.http_protocol import JoinedWrites


@pytest.fixture
def socket():
    """A transport that records its calls."""
    return Mock(asyncio.Transport)


@pytest.fixture
async def joined(socket):
    return JoinedWrites(socket, asyncio.get_running_loop())


async def test_the_writes_of_a_turn_are_sent_together(joined, socket):
    joined.write(b"head")
    joined.write(b"body")
    await asyncio.sleep(0)
    joined.write(b"next")
    await asyncio.sleep(0)

    assert socket.mock_calls == [call.write(b"headbody"), call.write(b"next")]


async def test_close_sends_first(joined, socket):
    joined.write(b"answer")
    joined.close()
    await asyncio.sleep(0)

    assert socket.mock_calls == [call.write(b"answer"), call.close()]
