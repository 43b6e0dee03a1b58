"""Servers that give the answers of the test, over HTTP or HTTPS, or none."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class AnsweringServer:
    """Answers every request with `answer`, and counts the requests. With a context it speaks TLS."""

    def __init__(self, answer: Answer, context: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.requests = 0
        self.port = 0
        self._context = context
        self._conversations: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        """Serve until the block is left, always on the same port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for conversation in self._conversations:
                conversation.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            # The client may speak another protocol, or disconnect.
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                await self.answer(writer)
                await writer.drain()
        finally:
            self._conversations.discard(task)
            writer.close()


@asynccontextmanager
async def answering(answer: bytes | None, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Answer every request with the same bytes, or never. Yields the port."""

    async def answer_so(writer: asyncio.StreamWriter) -> None:
        if answer is None:
            await asyncio.Event().wait()
        else:
            writer.write(answer)

    server = AnsweringServer(answer_so, context)
    async with server.up():
        yield server.port


def http_answer(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
