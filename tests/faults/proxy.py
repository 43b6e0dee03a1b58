"""A TCP connection that can be cut, refused, stalled, stranded and slowed: stands before a real server."""

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Self

from yarl import URL

from deploy.local.machine.ports import free_port

_CHUNK_BYTES = 65_536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time: close() sends RST

Direction = Literal["there", "back"]


class Proxy:
    """Passes on to the server of *url* whatever comes in at its own `url`, unless told otherwise."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._there = URL(url)
        self._port = free_port()
        self._listening: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._bytes_per_second: float | None = None
        self._delay_seconds = 0.0
        self._swallowing = False

    async def __aenter__(self) -> Self:
        await self.admit()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        self.cut()

    @property
    def url(self) -> str:
        """The server's URL with our address in it."""
        return str(self._there.with_host("127.0.0.1").with_port(self._port))

    @property
    def is_open(self) -> bool:
        """Whether there is any connection."""
        return bool(self._connections)

    @property
    def youngest_seconds(self) -> float:
        """The age of the youngest connection."""
        now = asyncio.get_running_loop().time()
        return min((now - connection.began for connection in self._connections), default=60.0)

    def cut(self) -> None:
        """Break every connection with RST, in both directions."""
        for connection in list(self._connections):
            connection.reset()

    async def refuse(self) -> None:
        """Take no more connections; those that are open stay."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    async def admit(self) -> None:
        """Take connections again."""
        if self._listening is None:
            self._listening = await asyncio.start_server(self._accept, "127.0.0.1", self._port)

    def stall(self) -> None:
        """Keep and accept connections, but pass nothing on, not even that an end has closed."""
        self._flowing.clear()

    def resume(self) -> None:
        """Pass on what was held, and all that follows."""
        self._flowing.set()

    def strand(self) -> None:
        """Make every open connection half-open for good: no byte passes; new ones are not concerned."""
        for connection in self._connections:
            connection.stranded = True

    def vanish(self) -> Callable[[], None]:
        """Break every connection at the client's end; the server hears nothing until the result is called."""
        vanished = list(self._connections)
        for connection in vanished:
            connection.stranded = True
            connection.client.transport.abort()

        def tell_the_server() -> None:
            for connection in vanished:
                connection.reset()

        return tell_the_server

    def clear_stranded(self) -> None:
        """Let both ends of what is stranded know, as a firewall does that has forgotten a connection."""
        for connection in list(self._connections):
            if connection.stranded:
                connection.reset()

    def slow(self, *, bytes_per_second: float, delay_seconds: float) -> None:
        """Pass everything on late and little by little, until `hurry`."""
        self._bytes_per_second = bytes_per_second
        self._delay_seconds = delay_seconds

    def hurry(self) -> None:
        """End `slow`."""
        self._bytes_per_second = None
        self._delay_seconds = 0.0

    async def swallow_answers_and_cut(self, seconds: float) -> None:
        """Let the server hear everything and the client nothing for *seconds*, then break the connections."""
        self._swallowing = True
        try:
            await asyncio.sleep(seconds)
            self.cut()
        finally:
            self._swallowing = False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._there.host is not None
        assert self._there.port is not None
        _reset_on_close(writer)
        try:
            there, back = await asyncio.open_connection(self._there.host, self._there.port)
        except OSError:
            writer.transport.abort()
            return
        _reset_on_close(back)
        connection = _Connection(writer, back)
        self._connections.add(connection)
        ways = (self._pass(connection, reader, back, "there"), self._pass(connection, there, writer, "back"))
        try:
            await asyncio.gather(*ways)
        finally:
            connection.reset()
            self._connections.discard(connection)

    async def _pass(
        self,
        connection: "_Connection",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        direction: Direction,
    ) -> None:
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                await self._hold(connection, len(chunk))
                if direction == "there" or not self._swallowing:
                    writer.write(chunk)
                    await writer.drain()
        await self._hold(connection, 0)
        connection.reset()

    async def _hold(self, connection: "_Connection", size: int) -> None:
        """Wait until as many bytes may pass."""
        if connection.stranded:
            await connection.gone.wait()
        await self._flowing.wait()
        if self._bytes_per_second is not None:
            await asyncio.sleep(self._delay_seconds + size / self._bytes_per_second)


class _Connection:
    """Both ends of one connection."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.stranded = False
        self.gone = asyncio.Event()
        self.began = asyncio.get_running_loop().time()

    def reset(self) -> None:
        """Break it at both ends."""
        self.gone.set()
        self.client.transport.abort()
        self.server.transport.abort()


def _reset_on_close(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
