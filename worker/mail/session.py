"""Sends one e-mail after the other over a connection, with pipelining (RFC 5321, RFC 2920).

aiosmtplib connects, encrypts and logs in. It waits for each reply before it sends the next command.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import aiosmtplib

# In place of the code of a reply that the mail server did not send, or that cannot be one to this command.
NO_REPLY = 0
_SERVICE_NOT_AVAILABLE = 421  # The mail server ends the session.
_COMPLETED = range(200, 300)
_CONTENT_EXPECTED = range(354, 355)
# Replies to MAIL or to the content of providers that limit how many e-mails they take, or over how many
# connections. To RCPT, 454 refuses one recipient, as in Postfix's "454 4.7.1 Relay access denied".
_THROTTLING = frozenset({432, 454})
# The reply to the content may take so many times as long as any other: ten minutes of filters, by default
# (RFC 5321, section 4.5.3.2.6).
_CONTENT_PATIENCE = 10
_REPLY_LINE = re.compile(rb"([2-5][0-9]{2})(?:([- ])(.*))?\r?\n", re.DOTALL)
_MOST_LINES = 100  # of one reply
_LONGEST_LINE = 8 * 1024


class Reply(NamedTuple):
    """A mail server's reply to a command, or to the content of an e-mail."""

    to: str  # MAIL, RCPT, DATA, RSET, QUIT or content
    code: int
    text: str = ""

    @property
    def is_acceptance(self) -> bool:
        """Whether the command was carried out: a session returns no other code below 400."""
        return NO_REPLY < self.code < 400

    @property
    def ends_session(self) -> bool:
        """Whether no further command would be carried out."""
        return self.code in {NO_REPLY, _SERVICE_NOT_AVAILABLE}

    @property
    def is_throttling(self) -> bool:
        """Whether the mail server limits how many e-mails it takes, and did not take this one."""
        return self.code in _THROTTLING and self.to in {"MAIL", "content"}

    @property
    def concerns_session(self) -> bool:
        """Whether the e-mail was refused unseen, so that a new session may accept it."""
        if self.to == "MAIL":
            return not self.is_acceptance and not self.is_throttling
        return self.to != "content" and self.ends_session


class Session:
    """A session that is used for one e-mail at a time. If an error is raised, it is not usable any more."""

    def __init__(self, connection: aiosmtplib.SMTP, *, seconds: float) -> None:
        """Take over the connection, after EHLO. Nothing else may read from it any more.

        Each reply has to arrive within *seconds*, that to the content within ten times as many.
        """
        if connection.transport is None:
            raise ConnectionResetError
        transport = cast("asyncio.Transport", connection.transport)
        loop = asyncio.get_running_loop()
        self._connection = connection
        self._seconds = seconds
        self._reader = asyncio.StreamReader(limit=_LONGEST_LINE, loop=loop)
        protocol = asyncio.StreamReaderProtocol(self._reader, loop=loop)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        self._writer = asyncio.StreamWriter(transport, protocol, self._reader, loop)
        self._pipelines = connection.supports_extension("pipelining")
        self._between_emails = True

    @property
    def is_usable(self) -> bool:
        """Whether another e-mail may be sent."""
        return self._between_emails and not self._writer.is_closing()

    async def send(
        self, sender: str, recipient: str, content: bytes, *, before_content: Callable[[], None]
    ) -> Reply:
        """Send an e-mail, whose lines end with CRLF. Returns the first refusal, or the reply to the content.

        *before_content* is called just before the content is sent. It may raise to withhold the content.
        """
        self._between_emails = False
        replies = await self._command(f"MAIL FROM:<{sender}>", f"RCPT TO:<{recipient}>", "DATA")
        refusal = next((reply for reply in replies if not reply.is_acceptance), None)
        if refusal is not None:
            await self._reset(replies)
            return refusal
        before_content()
        stuffed = re.sub(rb"(?m)^\.", b"..", content) + b".\r\n"
        (reply,) = await self._exchange(stuffed, ["content"], seconds=self._seconds * _CONTENT_PATIENCE)
        self._between_emails = not reply.ends_session
        return reply

    async def _reset(self, replies: Sequence[Reply]) -> None:
        """Make the session usable after a refusal, unless it was of the sender: that is to be tried anew."""
        waits_for_content = replies[-1].to == "DATA" and replies[-1].is_acceptance
        ended = any(reply.ends_session for reply in replies)
        if replies[0].is_acceptance and not waits_for_content and not ended:
            (reset,) = await self._command("RSET")
            self._between_emails = reset.is_acceptance

    async def quit(self) -> None:
        """End the session in an orderly way, within a second."""
        try:
            await self._exchange(b"QUIT\r\n", ["QUIT"], seconds=1.0)
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    async def _command(self, *commands: str) -> list[Reply]:
        """Send commands: all at once, or each after an acceptance of the one before. Returns the replies."""
        lines = [f"{command}\r\n".encode("ascii") for command in commands]
        names = [command[:4] for command in commands]
        if self._pipelines:
            return await self._exchange(b"".join(lines), names, seconds=self._seconds)
        replies: list[Reply] = []
        for line, name in zip(lines, names, strict=True):
            replies += await self._exchange(line, [name], seconds=self._seconds)
            if not replies[-1].is_acceptance:
                break
        return replies

    async def _exchange(self, sent: bytes, commands: Sequence[str], *, seconds: float) -> list[Reply]:
        """Send *commands*, and return a reply for each.

        NO_REPLY is the last if a reply does not arrive in time, or cannot be one to this command: after one
        reply too many, each would be taken for the reply to the next command.
        """
        replies: list[Reply] = []
        try:
            if self._writer.is_closing():
                raise ConnectionResetError  # Writing to a closed connection is a RuntimeError in uvloop.
            self._writer.write(sent)
            async with asyncio.timeout(seconds):
                for command in commands:
                    replies.append(await self._read_reply(command))  # noqa: PERF401 - kept when one fails
        except (OSError, TimeoutError, ValueError):  # ValueError: a line is too long, or no reply to this
            self._writer.close()
            replies.append(Reply(commands[len(replies)], NO_REPLY))
        return replies

    async def _read_reply(self, command: str) -> Reply:
        acceptance = _CONTENT_EXPECTED if command == "DATA" else _COMPLETED
        texts: list[str] = []
        while len(texts) < _MOST_LINES:
            line = _REPLY_LINE.fullmatch(await self._reader.readline())
            if line is None:
                break
            texts.append((line[3] or b"").strip().decode("utf-8", "surrogateescape"))
            if line[2] != b"-":
                code = int(line[1])
                if code < 400 and code not in acceptance:
                    raise ValueError("a reply to something else")
                return Reply(command, code, "\n".join(texts))
        raise ValueError("not in the form of SMTP")
