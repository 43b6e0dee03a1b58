"""A mail server that refuses, stalls and dies on demand, and records which process handed over what."""

import asyncio
import random
import re
import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from tests.faults.verdict.records import Acceptance
from tests.harness.mail_server import ScriptedMailServer, Session

REFUSED_RECIPIENT = b"refused-"  # addresses with this prefix are refused permanently

_OK = b"250 OK"
_ACCEPTED = b"250 OK accepted"
_MESSAGE_ID = re.compile(rb"^Message-ID:\s*<([^>]*)>", re.MULTILINE | re.IGNORECASE)
_ADDRESS = re.compile(rb"<([^>]*)>")
_LINK = re.compile(rb"https://\S+[?]secret=([\w-]{43})")


class MailServer(ScriptedMailServer):
    """A scripted mail server whose replies depend on the fault of the moment."""

    def __init__(self, processes: Sequence[str], chance: random.Random) -> None:
        super().__init__(processes)
        self.acceptances: list[Acceptance] = []
        self.refusal: bytes | None = None  # a 4xx for every e-mail
        self.sender_refusal: bytes | None = None  # a 4xx to every MAIL
        self.quotes = False  # the link, in every reply to a content
        self.quoted: set[str] = set()  # the secrets in these links
        self.delayed = 0  # replies to contents that were delayed so far
        self._delays: dict[str, float] = {}  # in seconds, of the replies to the contents of these processes
        self.death_rate = 0.0  # the share of acceptances whose reply is lost
        self.hangs_up_after: str | None = None  # the command whose reply is the last: RCPT or DATA
        self.held_sessions = 0
        self._held_process: str | None = None
        self._released = asyncio.Event()
        self._chance = chance
        self._answering = asyncio.Event()
        self._answering.set()
        self._recipients: WeakKeyDictionary[Session, bytes] = WeakKeyDictionary()
        # The acceptances whose reply the sender may not have read yet.
        self._unread: WeakKeyDictionary[Session, Acceptance] = WeakKeyDictionary()

    def stall(self) -> None:
        """Reply to nothing until `resume`."""
        self._answering.clear()

    def resume(self) -> None:
        """End `stall`."""
        self._answering.set()

    def delay_acceptances(self, process: str, seconds: float) -> None:
        """Reply to the contents of this process only so long after accepting them."""
        self._delays[process] = seconds

    def hold(self, process: str) -> None:
        """Reply to no RCPT of this process until `release`: its e-mails wait before their content."""
        self._held_process = process
        self._released.clear()

    def release(self) -> None:
        """End `hold`."""
        self._held_process = None
        self._released.set()

    def hang_up(self) -> None:
        """Break every connection. A reply that the sender may not have read counts as lost."""
        for session in self._open:
            if session in self._unread:
                self._unread[session].answered = False
        super().hang_up()

    async def reply_to(self, session: Session, command: str, sent: bytes) -> bytes | None:
        """Return the reply to a command, or None to close the connection."""
        if command != "content":
            self._unread.pop(session, None)  # The sender goes on, so it has read the reply before.
        reply = await self._reply_to(session, command, sent)
        await self._answering.wait()
        session.closes_after_reply = command == self.hangs_up_after
        return reply

    async def _reply_to(self, session: Session, command: str, sent: bytes) -> bytes | None:
        match command:
            case "MAIL" if self.sender_refusal:
                return self.sender_refusal
            case "RCPT":
                reply = self._take_recipient(session, sent)
                if reply == _OK:
                    await self._wait_while_held(session.sender)
                return reply
            case "content":
                await self._answering.wait()
                reply_to_content = self._take_content(session, sent)
                if reply_to_content == _ACCEPTED:
                    await self._delay(session.sender)
                return self._with_link(reply_to_content, sent)
            case _:
                return await super().reply_to(session, command, sent)

    async def _wait_while_held(self, process: str) -> None:
        if process == self._held_process:
            self.held_sessions += 1
            try:
                await self._released.wait()
            finally:
                self.held_sessions -= 1

    async def _delay(self, process: str) -> None:
        seconds = self._delays.get(process, 0.0)
        self.delayed += seconds > 0
        await asyncio.sleep(seconds)

    def _with_link(self, reply: bytes | None, content: bytes) -> bytes | None:
        link = _LINK.search(content)
        if reply is None or link is None or not self.quotes:
            return reply
        self.quoted.add(link[1].decode())
        return reply + b": " + link[0]

    def _take_recipient(self, session: Session, line: bytes) -> bytes:
        address = _ADDRESS.search(line)
        self._recipients[session] = address[1] if address else b""
        if self._recipients[session].startswith(REFUSED_RECIPIENT):
            return b"550 5.1.1 no such mailbox"
        return self.refusal or _OK

    def _take_content(self, session: Session, content: bytes) -> bytes | None:
        """Accept an e-mail, or refuse it. None when the connection breaks instead of a reply."""
        if session.is_aborted:
            return None  # The content arrived before the server died, which never read it.
        if self.refusal is not None:
            return self.refusal
        message_id = _MESSAGE_ID.search(content)
        acceptance = Acceptance(
            message_id[1].decode() if message_id else "",
            self._recipients[session].decode(),
            session.sender,
            session.connected_at,
            time.monotonic(),
        )
        self.acceptances.append(acceptance)
        if self._chance.random() < self.death_rate:
            acceptance.answered = False
            session.abort()
            return None
        self._unread[session] = acceptance
        return _ACCEPTED
