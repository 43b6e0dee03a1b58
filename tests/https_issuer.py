"""An issuer's key server: real HTTPS, and whatever may be wrong with it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from tests.certificates import Authority

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class HttpsIssuer:
    """Answers every request as `answer` says, and counts them."""

    def __init__(self, authority: Authority) -> None:
        self.answer: Answer = status(503)
        self.requests = 0
        self.port = 0
        self._context = authority.server_context()

    @property
    def url(self) -> str:
        """Where the keys are."""
        return f"https://127.0.0.1:{self.port}/jwks.json"

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        """Serve until the block is left; then nobody listens, and the next time it is at the same port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            await self.answer(writer)
            await writer.drain()
        writer.close()


def status(code: int, body: bytes = b"", *headers: str) -> Answer:
    """Answer with this status, body and further headers."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {code} Status", f"Content-Length: {len(body)}", "Connection: close", *headers]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    return answer


def after(seconds: float, answer: Answer) -> Answer:
    """Answer late."""

    async def answer_late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        await answer(writer)

    return answer_late


async def drip(writer: asyncio.StreamWriter) -> None:
    """Begin an answer, and never come to its end."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not writer.is_closing():
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def pour(writer: asyncio.StreamWriter) -> None:
    """Answer with a body that has no end."""
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    while not writer.is_closing():
        writer.write(b" " * 65_536)
        await writer.drain()


async def babble(writer: asyncio.StreamWriter) -> None:
    """Answer with what is not HTTP."""
    writer.write(b"\x00\xff nonsense\r\n\r\n")
