"""A connection that can send any bytes to an API."""

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

import httpx


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


@dataclass
class RawConnection:
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _closes: bool = True  # by its latest answer, if there was one

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def send_in_pieces(self, data: bytes, size: int) -> None:
        """Send these bytes in pieces of this size, each in a turn of the event loop."""
        for start in range(0, len(data), size):
            if self._writer.is_closing():
                return  # The server has closed the connection.
            self.send(data[start : start + size])
            await asyncio.sleep(0)

    def hang_up(self) -> None:
        self._writer.transport.abort()

    async def answer(self) -> Answer:
        async with asyncio.timeout(10):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        self._closes = headers.get("connection") == "close"
        return Answer(int(head[0].split(" ")[1]), headers, body)

    async def is_closed(self) -> bool:
        """Whether the server closes the connection, as its latest answer said, without sending more.

        Without that word in the answer, it may be closed only because it has been idle for some seconds.
        """
        return self._closes and await self.rest() == b""

    async def rest(self) -> bytes:
        """Return what the server sends until it closes the connection, for whatever reason."""
        async with asyncio.timeout(30):
            return await self._reader.read()

    async def trickle(self, piece: bytes) -> bytes:
        """Send *piece* repeatedly until the server closes the connection, and return what it has sent."""
        rest = asyncio.create_task(self.rest())
        while not rest.done():
            self.send(piece)
            await asyncio.wait([rest], timeout=0.02)
        # The last piece may have come too late, and have reset the connection.
        return b"" if isinstance(rest.exception(), ConnectionError) else rest.result()


async def connect_to(api: httpx.AsyncClient | str) -> RawConnection:
    url = httpx.URL(api) if isinstance(api, str) else api.base_url
    return RawConnection(*await asyncio.open_connection(url.host, url.port))


def head(sender: httpx.AsyncClient | str, *headers: str, line: str = "POST /v1/request HTTP/1.1") -> bytes:
    """Return the head of a request, with the token of a client, or with this token."""
    authorization = f"Bearer {sender}" if isinstance(sender, str) else sender.headers["Authorization"]
    usual = ["Host: api", f"Authorization: {authorization}", "Content-Type: application/json"]
    return "\r\n".join([line, *usual, *headers, "", ""]).encode()
