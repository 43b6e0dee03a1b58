"""A TCP proxy in front of a real server, which disturbs connections, and a log of Postgres's statements."""

import asyncio
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass

from yarl import URL

from tests.harness.loopback_server import LoopbackServer

Watcher = Callable[[bytes], None]

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time: close() sends RST
_POSTGRES_TLS_REQUEST = struct.pack(">II", 8, 80877103)
# The start-up message follows a request for TLS or for GSSAPI, and has no type, either.
_ENCRYPTION_REQUESTS = (_POSTGRES_TLS_REQUEST[4:], struct.pack(">I", 80877104))
_DEFAULT_PORTS = {"amqp": 5672, "postgresql": 5432, "postgres": 5432}


@dataclass(eq=False)
class _Connection:
    ends: list[asyncio.StreamWriter]  # the client, and the server once it has accepted
    task: asyncio.Task[None]  # forwards between them
    began: float
    is_stranded: bool = False

    def reset(self) -> None:
        for end in self.ends:
            _reset(end)
        self.task.cancel()


class TcpProxy(LoopbackServer):
    """Forwards every connection at `url`, which is *url* with another address, to the server at *url*.

    *watch* makes a watcher for each connection; the watcher is called with each chunk that the client sends.
    With a context clients have to use TLS, which ends here, and `amqp` in `url` becomes `amqps`.
    """

    def __init__(
        self,
        url: str,
        watch: Callable[[], Watcher] | None = None,
        *,
        name: str = "",
        context: ssl.SSLContext | None = None,
    ) -> None:
        server = URL(url)
        self._speaks_postgres = server.scheme in ("postgres", "postgresql")
        super().__init__(None if self._speaks_postgres else context)
        ours = server.with_host("127.0.0.1").with_port(self.port)
        self.url = str(ours.with_scheme("amqps") if context and not self._speaks_postgres else ours)
        self.name, self.context, self._watch = name, context, watch
        self.connections = 0  # accepted so far
        self.refused = 0  # closed by `refuse` so far
        self.disturbed = 0  # connections cut, and chunks held, stranded, delayed or swallowed so far
        self.marker_reached = asyncio.Event()  # of `hold_before`
        self._servers = deque([server])
        self._open: set[_Connection] = set()
        self._refusing = self._swallowing = False
        self._flowing, self._past_marker = asyncio.Event(), asyncio.Event()
        self._seconds_per_chunk = self._seconds_per_byte = 0.0
        self.resume()

    @property
    def youngest_seconds(self) -> float:
        now = asyncio.get_running_loop().time()
        return min((now - connection.began for connection in self._open), default=60.0)

    def lead_to(self, *urls: str) -> None:
        """Forward new connections to these servers, in turn, skipping those that refuse connections."""
        self._servers = deque(map(URL, urls))

    async def refuse(self) -> None:
        """Cut every connection, and close each new one at once and count it, until `admit`."""
        self._refusing = True
        await self.cut()

    def admit(self) -> None:
        self._refusing = False

    async def cut(self) -> None:
        """Reset every connection at both ends."""
        connections = list(self._open)
        self.disturbed += len(connections)
        for connection in connections:
            connection.reset()
        await asyncio.gather(*(connection.task for connection in connections), return_exceptions=True)

    def hold(self) -> None:
        """Accept connections, but forward nothing until `resume`, as a network that drops packets."""
        self._flowing.clear()

    def hold_before(self, marker: bytes) -> None:
        """Forward what clients send up to *marker*, and hold the rest until `resume`. Answers pass."""
        self._hold_before = marker
        self._past_marker.clear()

    def resume(self) -> None:
        """End `hold` and `hold_before`: forward what was held, and all that follows."""
        self._hold_before = b""
        self._flowing.set()
        self._past_marker.set()

    def strand(self) -> None:
        """Make every open connection half-open for good: no byte passes. New connections work."""
        for connection in self._open:
            connection.is_stranded = True

    def clear_stranded(self) -> None:
        """Reset the stranded connections at both ends, as a firewall that has forgotten them."""
        for connection in list(self._open):
            if connection.is_stranded:
                connection.reset()

    def vanish(self) -> None:
        """Reset every connection at the client's end, and at the server's end by `clear_stranded`."""
        self.strand()
        self.disturbed += len(self._open)
        for connection in self._open:
            _reset(connection.ends[0])

    def slow(self, *, bytes_per_second: float, delay_seconds: float) -> None:
        """Delay every chunk, and limit the rate, until `hurry`."""
        self._seconds_per_chunk, self._seconds_per_byte = delay_seconds, 1 / bytes_per_second

    def hurry(self) -> None:
        self._seconds_per_chunk = self._seconds_per_byte = 0.0

    async def swallow_answers_and_cut(self, seconds: float) -> None:
        """Forward only what clients send for *seconds*, then cut every connection."""
        self._swallowing = True
        try:
            await asyncio.sleep(seconds)
            await self.cut()
        finally:
            self._swallowing = False

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            self.refused += 1
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        connection = _Connection([writer], task, asyncio.get_running_loop().time())
        self._open.add(connection)
        try:
            if self.context and self._speaks_postgres:
                if await reader.readexactly(8) != _POSTGRES_TLS_REQUEST:
                    raise ConnectionAbortedError("the client does not begin with TLS")
                writer.write(b"S")
                await writer.start_tls(self.context)
            self.connections += 1
            await self._forward(connection, reader)
        finally:
            self._open.discard(connection)
            for end in connection.ends:  # Data forwarded before still arrives.
                end.close()

    async def _forward(self, connection: _Connection, from_client: asyncio.StreamReader) -> None:
        """Forward both ways until either end has closed."""
        from_server, server = await self._connect()
        connection.ends.append(server)
        ways = [
            asyncio.create_task(self._pass(connection, from_client, server, self._watch and self._watch())),
            asyncio.create_task(self._pass(connection, from_server, connection.ends[0])),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for _ in range(len(self._servers)):
            url = self._servers[0]
            self._servers.rotate(-1)
            with suppress(OSError):
                return await asyncio.open_connection(url.host, url.port or _DEFAULT_PORTS[url.scheme])
        raise ConnectionRefusedError

    async def _pass(
        self,
        connection: _Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        watcher: Watcher | None = None,
    ) -> None:
        with suppress(OSError):
            while chunk := await reader.read(65_536):
                if watcher is not None:
                    watcher(chunk)
                await self._wait_for_leave(connection, len(chunk))
                if writer is connection.ends[0]:
                    if self._swallowing:
                        self.disturbed += 1
                        continue
                elif self._hold_before and self._hold_before in chunk:
                    before, marker, rest = chunk.partition(self._hold_before)
                    writer.write(before)
                    chunk = marker + rest
                    self.marker_reached.set()
                    await self._past_marker.wait()
                writer.write(chunk)
                await writer.drain()
        await self._wait_for_leave(connection, 0)

    async def _wait_for_leave(self, connection: _Connection, size: int) -> None:
        is_disturbed = connection.is_stranded or not self._flowing.is_set() or self._seconds_per_chunk > 0
        self.disturbed += is_disturbed
        if connection.is_stranded:
            await asyncio.Event().wait()  # until it is reset
        await self._flowing.wait()
        if self._seconds_per_chunk:
            await asyncio.sleep(self._seconds_per_chunk + size * self._seconds_per_byte)


def _reset(writer: asyncio.StreamWriter) -> None:
    if not writer.transport.is_closing():
        end: socket.socket = writer.get_extra_info("socket")
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()


class StatementLog:
    """Records each statement of Postgres clients, as it is on the wire, and the number of round trips."""

    def __init__(self) -> None:
        self.executed: list[str] = []
        self.round_trips = 0

    def clear(self) -> None:
        self.executed.clear()
        self.round_trips = 0

    def watch(self) -> Callable[[bytes], None]:
        """Return a watcher for one connection, called with what its client sends."""
        reading = self._read()
        next(reading)
        return reading.send

    def _read(self) -> Generator[None, bytes, None]:
        seen, bound, prepared = b"", b"", dict[bytes, str]()
        before_length = 0  # a type, from the start-up message on
        while True:
            while len(seen) < before_length + 4 or len(seen) < (
                end := before_length + int.from_bytes(seen[before_length : before_length + 4])
            ):
                seen += yield
            message, seen = seen[:end], seen[end:]
            kind, content = message[:1], message[5:]
            if not before_length:
                before_length = int(message[4:8] not in _ENCRYPTION_REQUESTS)
            elif kind == b"P":  # Parse: the name of the statement, its text
                name, text, _ = content.split(b"\0", 2)
                prepared[name] = text.decode()
            elif kind == b"B":  # Bind: the name of the portal, that of the statement
                bound = content.split(b"\0", 2)[1]
            elif kind == b"E":  # Execute
                self.executed.append(prepared[bound])
            elif kind == b"Q":  # a simple query
                self.executed.append(content[:-1].decode())
            self.round_trips += kind in (b"Q", b"S", b"H")  # Sync and Flush, too
