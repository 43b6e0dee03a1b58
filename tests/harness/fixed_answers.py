"""Servers that give the answers of the test, over HTTP or HTTPS, or none."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.harness.loopback_server import LoopbackServer

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class AnsweringServer(LoopbackServer):
    """Answers every request that has come up to *until* with `answer`, and counts the requests."""

    def __init__(
        self, answer: Answer, context: ssl.SSLContext | None = None, until: bytes = b"\r\n\r\n"
    ) -> None:
        super().__init__(context)
        self.answer = answer
        self._until = until
        self.requests = 0

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        await reader.readuntil(self._until)
        self.requests += 1
        await self.answer(writer)
        await writer.drain()


@asynccontextmanager
async def answering(
    answer: bytes | None, context: ssl.SSLContext | None = None, until: bytes = b"\r\n\r\n"
) -> AsyncIterator[int]:
    """Answer every request with the same bytes, or never. Yields the port."""

    async def answer_so(writer: asyncio.StreamWriter) -> None:
        if answer is None:
            await asyncio.Event().wait()
        else:
            writer.write(answer)

    async with AnsweringServer(answer_so, context, until) as server:
        yield server.port


def http_answer(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
