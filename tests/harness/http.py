"""The tests' HTTP clients: their errors must be in service/README.md; and connections for any bytes."""

import asyncio
import re
import ssl
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

import httpx

from tests.deploy import pages

# For plain HTTP. By default every client loads the authorities that the machine trusts, which takes 20 ms.
NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def lasting_headers(response: httpx.Response) -> list[tuple[str, str]]:
    """Return the headers, in order, without those that differ each time."""
    each_time = {"date", "server", "x-request-id"}
    return [(name, value) for name, value in response.headers.items() if name not in each_time]


@cache
def documented_errors() -> list[list[str]]:
    """Return the cells of each row of the table: status, code, message, cause and remedy."""
    return pages.rows(pages.API, "Errors", "status")


def is_documented(status: int, code: str, message: str) -> bool:
    return any(
        row[:2] == [str(status), f"`{code}`"] and re.fullmatch(re.escape(row[2]).replace("…", ".+"), message)
        for row in documented_errors()
    )


async def check_errors(response: httpx.Response) -> None:
    is_json = response.headers.get("Content-Type") == "application/json"
    if response.status_code >= 400 and is_json and await response.aread():
        for error in response.json().get("errors") or ():
            assert is_documented(response.status_code, error["code"], error["message"]), error


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
