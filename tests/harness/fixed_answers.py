"""Servers that answer every connection with the same bytes, or never."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def answering(
    answer: bytes | None, context: ssl.SSLContext | None = None, *, after_seconds: float = 0
) -> AsyncIterator[int]:
    """Answer every connection with the same bytes, or never. Yields the port."""
    connections: list[asyncio.WriteTransport] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer.transport)
        try:
            if answer is not None:
                await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(after_seconds)
                writer.write(answer)
            else:
                await reader.read()  # until the client gives up
        except (asyncio.IncompleteReadError, OSError):
            pass  # The client spoke another protocol, or has disconnected.
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]
        # From Python 3.12 on the server's end waits for them, and a client may keep its own open.
        for connection in connections:
            connection.abort()


def http_answer(status: str, body: bytes) -> bytes:
    """Return a complete HTTP response."""
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (
        status.encode(),
        len(body),
        body,
    )
