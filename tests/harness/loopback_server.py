"""A server in the test's own event loop, on a port of the loopback."""

import asyncio
import ssl
from contextlib import suppress
from typing import Self

from deploy.local.machine.ports import free_port


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
