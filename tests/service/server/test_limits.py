"""Which connections are closed: those of callers that read too slowly, and which when there are too many."""

import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from service.server import limits
from service.server.asgi import Receive, Scope, Send
from service.server.http_protocol import HttpProtocol
from service.server.http_server import end_overdue

A_REQUEST = b"GET / HTTP/1.1\r\nHost: api\r\n\r\n"


class _Caller(asyncio.Transport):
    """The other end of a connection: it reads only what the test reads."""

    def __init__(self, server: ServerState) -> None:
        super().__init__()
        self.unread: list[bytes] = []
        self.read = 0
        self.is_cut_off = False
        config = uvicorn.Config(never_answers, http=HttpProtocol, ws="none", lifespan="off", log_config=None)
        self.protocol = HttpProtocol(config, server, {})
        self.protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert isinstance(data, bytes)
        self.unread.append(data)

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.unread)) - self.read

    def abort(self) -> None:
        self.is_cut_off = True

    def is_closing(self) -> bool:
        return self.is_cut_off

    async def gets(self, size: int) -> None:
        self.protocol.transport.write(bytes(size))
        await asyncio.sleep(0)


async def never_answers(_scope: Scope, _receive: Receive, _send: Send) -> None:
    await asyncio.Event().wait()


@pytest.fixture
async def server(monkeypatch):
    """The connections of one server, of which there may be three."""
    monkeypatch.setattr(limits, "MOST_CONNECTIONS", 3)
    state = ServerState()
    yield state
    for task in state.tasks:
        task.cancel()
    await asyncio.gather(*state.tasks, return_exceptions=True)


async def connected(server: ServerState) -> _Caller:
    """Return a caller that has connected later than those before it."""
    await asyncio.sleep(0.005)
    return _Caller(server)


async def test_reader_at_the_least_rate_is_served_and_a_slower_one_is_cut_off(server):
    caller = _Caller(server)
    caller.protocol.data_received(A_REQUEST)
    began = asyncio.get_running_loop().time() + 1
    end_overdue([caller.protocol], began)
    await caller.gets(10 * limits.LEAST_READ)
    for window in range(1, 4):
        caller.read += limits.LEAST_READ
        end_overdue([caller.protocol], began + window * limits.BODY_SECONDS)
    for seconds in range(1, 6):  # Neither more answers nor a byte that is read restarts its clock.
        await caller.gets(limits.LEAST_READ)
        caller.read += 1
        end_overdue([caller.protocol], began + 3 * limits.BODY_SECONDS + seconds)
    assert not caller.is_cut_off
    end_overdue([caller.protocol], began + 4 * limits.BODY_SECONDS)
    assert caller.is_cut_off


async def test_slowest_readers_are_cut_off_while_too_much_is_unread(server):
    slow, slower, _ = callers = [_Caller(server) for _ in range(3)]
    now = asyncio.get_running_loop().time()
    await slower.gets(limits.MOST_UNREAD // 2)
    end_overdue([each.protocol for each in callers], now + 1)
    await slow.gets(limits.MOST_UNREAD // 2 + 1)
    end_overdue([each.protocol for each in callers], now + 2)

    assert [each.is_cut_off for each in callers] == [False, True, False]


async def test_new_connection_replaces_the_one_idle_longest_then_the_slowest(server):
    idle_longer, slow, idle = [await connected(server) for _ in range(3)]
    slow.protocol.data_received(b"GET / HTTP/1.1\r\n")
    fresh = await connected(server)
    assert [each.is_cut_off for each in (idle_longer, slow, idle, fresh)] == [True, False, False, False]

    idle.protocol.data_received(A_REQUEST)
    fresh.protocol.data_received(A_REQUEST)
    fresher = await connected(server)
    assert [each.is_cut_off for each in (slow, idle, fresh, fresher)] == [True, False, False, False]

    fresher.protocol.data_received(A_REQUEST)
    assert (await connected(server)).is_cut_off, "no other waits for its caller"
    assert not fresher.is_cut_off
