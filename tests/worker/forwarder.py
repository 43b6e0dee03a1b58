"""A TCP proxy before a real server, whose connections a test can cut, refuse and hold."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from yarl import URL

Watcher = Callable[[bytes], None]

_DEFAULT_PORTS = {"amqp": 5672, "postgresql": 5432, "postgres": 5432, "smtp": 25}


def _see_nothing(_: bytes) -> None:
    pass


class Forwarder:
    """Forwards connections to its own `url` to the server of *url*, unless the test cuts or holds them."""

    def __init__(self, url: str, watch: Callable[[], Watcher] = lambda: _see_nothing) -> None:
        self._server_url = URL(url)
        self._watch = watch  # makes one for each connection; it is called with what the client sends
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._resumed = asyncio.Event()
        self.marker_reached = asyncio.Event()  # of `hold_before`
        self._refusing = False
        self._hold_before: bytes | None = None
        self._open: set[asyncio.Task[None]] = set()
        self.connections = 0  # accepted so far
        self.refused = 0  # connections refused so far

    async def __aenter__(self) -> Self:
        self._listening = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self._port: int = self._listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.close()
        await self.cut()

    @property
    def url(self) -> str:
        """The server's URL with the address of this proxy."""
        return str(self._server_url.with_host("127.0.0.1").with_port(self._port))

    async def cut(self) -> None:
        """Close every open connection."""
        connections = list(self._open)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def refuse(self) -> None:
        """Close every connection, and each new one at once, until `admit`."""
        self._refusing = True
        await self.cut()

    def admit(self) -> None:
        """Accept connections again."""
        self._refusing = False

    def hold(self) -> None:
        """Keep connections open but forward nothing, until `resume`."""
        self._flowing.clear()

    def hold_before(self, marker: bytes) -> None:
        """Forward what the client sends up to *marker*, and hold the rest. Replies are still forwarded."""
        self._hold_before = marker
        self._resumed.clear()

    def resume(self) -> None:
        """Forward what was held, and everything after it."""
        self._hold_before = None
        self._flowing.set()
        self._resumed.set()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            self.refused += 1
            writer.transport.abort()
            return
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        port = self._server_url.port or _DEFAULT_PORTS[self._server_url.scheme]
        there_reader, there_writer = await asyncio.open_connection(self._server_url.host, port)
        try:
            await self._pass_both_ways(reader, writer, there_reader, there_writer)
        except asyncio.CancelledError:
            pass  # By `cut`. Aborting the transports below closes both ends.
        finally:
            writer.transport.abort()
            there_writer.transport.abort()
            self._open.discard(task)

    async def _pass_both_ways(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there_reader: asyncio.StreamReader,
        there_writer: asyncio.StreamWriter,
    ) -> None:
        """Return as soon as either end has closed."""
        ways = [
            asyncio.create_task(self._pass(reader, there_writer, self._watch(), from_client=True)),
            asyncio.create_task(self._pass(there_reader, writer, _see_nothing, from_client=False)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        see: Watcher,
        *,
        from_client: bool,
    ) -> None:
        with suppress(OSError):
            while chunk := await reader.read(65_536):
                see(chunk)
                await self._flowing.wait()
                marker = self._hold_before
                if from_client and marker is not None and marker in chunk:
                    position = chunk.index(marker)
                    writer.write(chunk[:position])
                    chunk = chunk[position:]
                    self.marker_reached.set()
                    await self._resumed.wait()
                writer.write(chunk)
                await writer.drain()
