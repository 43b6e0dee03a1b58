"""Servers that give the answers of the test, over HTTP or HTTPS, or none."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.harness.loopback_server import LoopbackServer

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


class AnsweringServer(LoopbackServer):
    """Answers every request that has come up to *until* with `answer`, if there is one, and counts them."""

    def __init__(
        self, answer: Answer | None, context: ssl.SSLContext | None = None, until: bytes = b"\r\n\r\n"
    ) -> None:
        super().__init__(context)
        self.answer, self._until, self.requests = answer, until, 0

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(self._until)
        self.requests += 1
        if self.answer is None:
            await asyncio.Event().wait()
        elif isinstance(self.answer, bytes):
            writer.write(self.answer)
        else:
            await self.answer(writer)
        await writer.drain()


@asynccontextmanager
async def answering(
    answer: Answer | None, context: ssl.SSLContext | None = None, until: bytes = b"\r\n\r\n"
) -> AsyncIterator[int]:
    """Answer every request so. Yields the port."""
    async with AnsweringServer(answer, context, until) as server:
        yield server.port


def http_answer(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
