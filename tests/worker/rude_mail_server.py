"""A mail server that replies as the test sets it, correctly or not, or closes the connection."""

import asyncio
from contextlib import suppress
from typing import Self

_USUAL_REPLIES = {
    "greeting": b"220 mail.example.com ESMTP",
    "EHLO": b"250 mail.example.com",
    "MAIL": b"250 OK",
    "RCPT": b"250 OK",
    "DATA": b"354 Go ahead",
    "content": b"250 OK accepted",
    "RSET": b"250 OK",
    "QUIT": b"221 Bye",
}


class RudeMailServer:
    """Knows just enough SMTP to break its rules.

    `replies` has the reply to each command, to a new connection (`greeting`) and to the end of the e-mail
    (`content`); None closes the connection instead. `replies_once` take precedence, once each.
    """

    def __init__(self) -> None:
        self.replies: dict[str, bytes | None] = {**_USUAL_REPLIES}
        self.replies_once: dict[str, bytes | None] = {}
        self.contents: list[bytes] = []  # of every e-mail it was sent, whatever it replied
        self.connections = 0
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """The SMTP_URL of this server."""
        return f"smtp://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port: int = self._listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Close every connection."""
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        with suppress(OSError, asyncio.IncompleteReadError):
            await self._converse(reader, writer)
        self._open.discard(writer)
        writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reply = self._reply_to("greeting")
        while reply is not None:
            writer.write(reply + b"\r\n")
            await writer.drain()
            if reply.startswith(b"354"):
                self.contents.append(await reader.readuntil(b"\r\n.\r\n"))
                reply = self._reply_to("content")
            else:
                line = await reader.readuntil(b"\r\n")
                reply = self._reply_to(line[:4].decode().strip().upper())

    def _reply_to(self, command: str) -> bytes | None:
        return self.replies_once.pop(command, self.replies[command])
