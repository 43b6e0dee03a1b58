"""A mail server that refuses, stalls and dies on demand, and records which process handed over what."""

import asyncio
import random
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch
from weakref import WeakKeyDictionary

from tests.faults.verdict.records import Acceptance, Record
from tests.harness.mail_server import ACCEPTED, ScriptedMailServer, Session

REFUSED_RECIPIENT = b"refused-"  # addresses with this prefix are refused permanently

_MESSAGE_ID = re.compile(rb"^Message-ID:\s*<([^>]*)>", re.MULTILINE | re.IGNORECASE)
_ADDRESS = re.compile(rb"<([^>]*)>")
_LINK = re.compile(rb"(https://\S+[?]secret=[\w-]{43})")
_EVERYTHING = ("", "")


class MailServer(ScriptedMailServer):
    """A scripted mail server whose replies depend on the fault of the moment."""

    def __init__(self, record: Record, chance: random.Random) -> None:
        super().__init__()
        self.quotes = False  # the link, in every reply to a content
        self.quoted: set[str] = set()  # the secrets in these links
        self.death_rate = 0.0  # the share of acceptances whose reply is lost
        self.held = 0  # replies that wait for `release`
        self._to_hold: tuple[str, str] | None = None
        self._released = asyncio.Event()
        self._record = record
        self._chance = chance
        # The acceptances whose reply the sender may not have read yet.
        self._unread: WeakKeyDictionary[Session, Acceptance] = WeakKeyDictionary()

    @contextmanager
    def holding(self, process: str = "", command: str = "") -> Iterator[None]:
        """Hold the replies to this command of this process, or all, until the end or `release`.

        Contents of e-mails are accepted before.
        """
        self._to_hold = process, command
        self._released.clear()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        self._to_hold = None
        self._released.set()

    def refusing(self) -> AbstractContextManager[object]:
        """Refuse every e-mail for now."""
        refusal = b"451 4.3.0 try again later"
        return patch.dict(self.replies, RCPT=refusal, content=refusal)

    def stop(self) -> None:
        """Break every connection. A reply that the sender may not have read counts as lost."""
        for acceptance in self._unread.values():
            acceptance.answered = False
        super().stop()

    async def reply_to(self, session: Session, command: str, sent: bytes) -> bytes | None:
        """Return the reply to a command, or None to close the connection."""
        if command != "content":
            self._unread.pop(session, None)  # The sender goes on, so it has read the reply before.
        await self._wait(_EVERYTHING)
        reply = await super().reply_to(session, command, sent)
        if command == "RCPT" and b"<" + REFUSED_RECIPIENT in sent:
            reply = b"550 5.1.1 no such mailbox"
        if command == "content" and reply == ACCEPTED:
            reply = self._accept(session, sent)
        await self._wait(_EVERYTHING, (session.sender, command))
        return reply

    async def _wait(self, *held: tuple[str, str]) -> None:
        if self._to_hold in held:
            self.held += 1
            try:
                await self._released.wait()
            finally:
                self.held -= 1

    def _accept(self, session: Session, content: bytes) -> bytes | None:
        """Accept an e-mail, and return the reply. None when the connection breaks instead of a reply."""
        message_id, recipient, link = (
            found[1].decode() if (found := pattern.search(text)) else ""
            for pattern, text in ((_MESSAGE_ID, content), (_ADDRESS, session.recipient), (_LINK, content))
        )
        acceptance = Acceptance(message_id, recipient, session.sender, session.connected_at, time.monotonic())
        self._record.acceptances.append(acceptance)
        if self._chance.random() < self.death_rate:
            acceptance.answered = False
            return None
        self._unread[session] = acceptance
        if not self.quotes or not link:
            return ACCEPTED
        self.quoted.add(link[-43:])  # the secret
        return ACCEPTED + f": {link}".encode()
