"""An SMTP server that accepts and counts everything.

Not one of tests/harness/mail_server.py, but built for speed: it shares the processors with the sender.
"""

import asyncio
from typing import Self, cast

_ANSWERS = {
    b"EHLO": b"250-sink\r\n250 PIPELINING\r\n",
    b"DATA": b"354 go on\r\n",
    b"QUIT": b"221 bye\r\n",
}


class SmtpSink:
    """Listens on a free port until its block is left."""

    def __init__(self) -> None:
        self.accepted = 0
        self.url = ""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Session(self), "127.0.0.1", 0)
        self.url = f"smtp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()


class _Session(asyncio.Protocol):
    def __init__(self, sink: SmtpSink) -> None:
        self._sink = sink
        self._received = b""
        self._in_content = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(b"220 sink\r\n")

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._transport.write(b"".join(iter(self._take, b"")))  # in one packet (RFC 2920, section 3.2)

    def _take(self) -> bytes:
        """Return the answer to the next command, or to the content after DATA; empty if it is incomplete."""
        whole, end, rest = self._received.partition(b"\r\n.\r\n" if self._in_content else b"\r\n")
        if not end:
            return b""
        self._received = rest
        if self._in_content:
            self._in_content = False
            self._sink.accepted += 1
            return b"250 accepted\r\n"
        command = whole[:4].upper()
        self._in_content = command == b"DATA"
        return _ANSWERS.get(command, b"250 sink\r\n")
