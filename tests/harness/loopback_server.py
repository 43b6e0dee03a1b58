"""Servers in the test's own event loop, on ports of the loopback: of any protocol, or with fixed answers."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self

from deploy.local.machine.ports import free_port

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


class LoopbackServer:
    """Accepts connections, always on the same port. With a context it speaks TLS."""

    longest_bytes = 1 << 16  # of what is read up to a separator

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.port = free_port()
        self._context = context
        self._listening: asyncio.Server | None = None
        self._conversations: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        await asyncio.gather(*self._conversations, return_exceptions=True)

    @property
    def open_connections(self) -> int:
        return len(self._conversations)

    async def start(self) -> None:
        """Listen, if it does not yet."""
        self._listening = self._listening or await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, limit=self.longest_bytes, ssl=self._context
        )

    def stop_listening(self) -> None:
        """Let connecting fail until `start`. Open connections stay."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def stop(self) -> None:
        """Break every connection, too."""
        self.stop_listening()
        for conversation in self._conversations:
            conversation.cancel()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. It is closed at the end."""
        raise NotImplementedError

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            # The client may disconnect, or speak another protocol.
            with suppress(OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
                await self.converse(reader, writer)
        finally:
            self._conversations.discard(task)
            writer.close()


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


def http_answer(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
