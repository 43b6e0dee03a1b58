"""A mail server that takes notes: it refuses, stalls and dies as told, and tells who handed over what."""

import asyncio
import random
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Self

from deploy.local.machine.ports import free_port
from tests.faults.records import Acceptance

REFUSED_RECIPIENT = b"refused-"  # addresses that begin so are refused for good

_OK = b"250 OK"
_LONGEST_MESSAGE = 1 << 20
_MESSAGE_ID = re.compile(rb"^Message-ID:\s*<([^>]*)>", re.MULTILINE | re.IGNORECASE)
_ADDRESS = re.compile(rb"<([^>]*)>")


class MailServer:
    """Speaks SMTP on one port for each of *processes*, so that it knows them apart."""

    def __init__(self, processes: Sequence[str], chance: random.Random) -> None:
        self.acceptances: list[Acceptance] = []
        self.refusal: bytes | None = None  # a 4xx for every e-mail
        self.death_rate = 0.0  # the share of acceptances whose answer is lost
        self.hangs_up_after: bytes | None = None  # the command whose answer is the last: RCPT or DATA
        self.held_sessions = 0
        self._held_process: str | None = None
        self._let_go = asyncio.Event()
        self._chance = chance
        self._ports = {process: free_port() for process in processes}
        self._listening: list[asyncio.Server] = []
        self._sessions: set[_Session] = set()
        self._answering = asyncio.Event()
        self._answering.set()

    def url(self, process: str) -> str:
        """Return the SMTP_URL for one of the processes."""
        return f"smtp://127.0.0.1:{self._ports[process]}"

    async def __aenter__(self) -> Self:
        await self.come_back()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.go_away()

    async def come_back(self) -> None:
        """Listen."""
        for process, port in self._ports.items():
            serve = partial(self._serve, process)
            listening = await asyncio.start_server(serve, "127.0.0.1", port, limit=_LONGEST_MESSAGE)
            self._listening.append(listening)

    def go_away(self) -> None:
        """Break every connection and refuse new ones."""
        for listening in self._listening:
            listening.close()
        self._listening.clear()
        for session in list(self._sessions):
            session.die()

    def stall(self) -> None:
        """Answer nothing."""
        self._answering.clear()

    def resume(self) -> None:
        """Answer what was asked, and all that follows."""
        self._answering.set()

    async def answering(self) -> None:
        """Wait until the server is in the mood."""
        await self._answering.wait()

    def hold(self, process: str) -> None:
        """Answer no RCPT of this process until `let_go`: what it sends then waits before its content."""
        self._held_process = process
        self._let_go.clear()

    def let_go(self) -> None:
        """End `hold`."""
        self._held_process = None
        self._let_go.set()

    async def passing(self, process: str) -> None:
        """Wait while this process is held."""
        if process == self._held_process:
            self.held_sessions += 1
            try:
                await self._let_go.wait()
            finally:
                self.held_sessions -= 1

    def dies_now(self) -> bool:
        """Whether the answer to the present acceptance is to be lost."""
        return self._chance.random() < self.death_rate

    async def _serve(self, process: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = _Session(self, reader, writer, process)
        self._sessions.add(session)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await session.converse()
        finally:
            self._sessions.discard(session)
            writer.transport.abort()


class _Session:
    """One connection of one sender."""

    def __init__(
        self, server: MailServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: str
    ) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self._process = process
        self._connected_at = time.monotonic()
        self._recipient = b""
        self._unread: Acceptance | None = None  # the sender may not have read our answer to it
        self._is_dead = False

    def die(self) -> None:
        """Break the connection."""
        self._is_dead = True
        if self._unread is not None:
            self._unread.answered = False
        self._writer.transport.abort()

    async def converse(self) -> None:
        """Answer one command after another."""
        await self._say(b"220 mail.example.com ESMTP")
        while line := await self._reader.readuntil(b"\r\n"):
            self._unread = None
            match line[:4].upper():
                case b"QUIT":
                    return await self._say(b"221 Bye")
                case b"RCPT":
                    reply = self._take_recipient(line)
                    if reply == _OK:
                        await self._server.passing(self._process)
                    await self._say(reply)
                    if self._server.hangs_up_after == b"RCPT":
                        return await self._hang_up()
                case b"DATA":
                    await self._say(b"354 Go ahead")
                    if self._server.hangs_up_after == b"DATA":
                        return await self._hang_up()
                    content = await self._reader.readuntil(b"\r\n.\r\n")
                    await self._server.answering()
                    if not self._take(content):
                        return None
                    await self._writer.drain()
                case _:
                    await self._say(_OK)
        return None

    async def _hang_up(self) -> None:
        """Close the connection in order: the sender reads all that was answered."""
        self._writer.close()
        await self._writer.wait_closed()

    async def _say(self, reply: bytes) -> None:
        await self._server.answering()
        self._writer.write(reply + b"\r\n")
        await self._writer.drain()

    def _take_recipient(self, line: bytes) -> bytes:
        address = _ADDRESS.search(line)
        self._recipient = address[1] if address else b""
        if self._recipient.startswith(REFUSED_RECIPIENT):
            return b"550 5.1.1 no such mailbox"
        return self._server.refusal or _OK

    def _take(self, content: bytes) -> bool:
        """Take charge of an e-mail, or not. False when the connection broke instead of an answer."""
        if self._is_dead:
            return False  # The content had come before the end, and nobody had looked at it.
        if self._server.refusal is not None:
            self._writer.write(self._server.refusal + b"\r\n")
            return True
        message_id = _MESSAGE_ID.search(content)
        self._unread = Acceptance(
            message_id[1].decode() if message_id else "",
            self._recipient.decode(),
            self._process,
            self._connected_at,
            time.monotonic(),
        )
        self._server.acceptances.append(self._unread)
        if self._server.dies_now():
            self.die()
            return False
        self._writer.write(b"250 OK accepted\r\n")
        return True
