"""A network between two processes that can be cut, or fall silent."""

import asyncio
from contextlib import suppress
from typing import Self

import httpx

_CHUNK_BYTES = 64 * 1024


class TcpForwarder:
    """Listens on a port of its own and passes every connection on to the server at *url*."""

    def __init__(self, url: str) -> None:
        there = httpx.URL(url)
        self._there = there
        self._port = 0
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()

    @property
    def url(self) -> str:
        """The address of the server by way of this forwarder."""
        return str(self._there.copy_with(host="127.0.0.1", port=self._port))

    async def __aenter__(self) -> Self:
        await self.switch_on()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.switch_off()

    async def switch_on(self) -> None:
        """Take connections, on the same port as before, and let everything through."""
        self._flowing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]

    async def fall_silent(self) -> None:
        """Keep every connection and take new ones, but let nothing through."""
        self._flowing.clear()

    async def switch_off(self) -> None:
        """Refuse connections, and cut those that are open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for end in self._ends:
            end.transport.abort()
        self._flowing.set()
        await asyncio.gather(*self._connections)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._connect(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        try:
            there_reader, there_writer = await asyncio.open_connection(self._there.host, self._there.port)
            self._ends.add(there_writer)
            await asyncio.gather(self._pass(reader, there_writer), self._pass(there_reader, writer))
            self._ends.discard(there_writer)
        finally:
            self._ends.discard(writer)
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
