"""SMTP sessions: e-mails one after the other over a connection, with pipelining (RFC 5321, RFC 2920).

aiosmtplib connects, encrypts and logs in. It waits for each reply before it sends the next command.
"""

import asyncio
import re
from collections.abc import Sequence
from typing import NamedTuple, cast

import aiosmtplib

# In place of the code of a reply that the mail server did not send, or that cannot be one to this command.
NO_REPLY = 0
_SERVICE_NOT_AVAILABLE = 421  # The mail server ends the session.
_COMPLETED = range(200, 300)
_CONTENT_EXPECTED = range(354, 355)
_REPLY_LINE = re.compile(rb"([2-5][0-9]{2})(?:([- ])(.*))?\r?\n", re.DOTALL)
_MOST_LINES = 100  # of one reply
_LONGEST_LINE = 8 * 1024


class Reply(NamedTuple):
    """A mail server's reply to one command."""

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


class Session:
    """A session that is used for one e-mail at a time. If an error is raised, it is not usable any more."""

    def __init__(self, connection: aiosmtplib.SMTP) -> None:
        """Take over the connection, after EHLO. Nothing else may read from it any more."""
        if connection.transport is None:
            raise ConnectionResetError
        transport = cast("asyncio.Transport", connection.transport)
        loop = asyncio.get_running_loop()
        self._connection = connection
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

    async def begin(self, sender: str, recipient: str, *, seconds: float) -> list[Reply]:
        """Send MAIL, RCPT and DATA, to be answered within *seconds*: all of them with pipelining, else each.

        Returns the replies, up to the first that is no acceptance. After three acceptances the mail server
        waits for the content.
        """
        self._between_emails = False
        commands = (f"MAIL FROM:<{sender}>", f"RCPT TO:<{recipient}>", "DATA")
        replies = await self._send_all(commands, seconds=seconds)
        accepted = [reply.is_acceptance for reply in replies]
        if all(accepted):
            return replies
        waits_for_content = len(replies) == len(commands) and accepted[-1]
        if not waits_for_content and not any(reply.ends_session for reply in replies):
            (reset,) = await self._send_all(["RSET"], seconds=seconds)
            self._between_emails = reset.is_acceptance
        return replies[: accepted.index(False) + 1]

    async def finish(self, content: bytes, *, seconds: float) -> Reply:
        """Send the content, whose lines end with CRLF, after `begin`. Returns the reply."""
        stuffed = re.sub(rb"(?m)^\.", b"..", content)
        (reply,) = await self._exchange(stuffed + b".\r\n", [_COMPLETED], seconds=seconds)
        self._between_emails = not reply.ends_session
        return reply

    async def quit(self) -> None:
        """End the session in an orderly way, within a second."""
        try:
            await self._send_all(["QUIT"], seconds=1.0)
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    async def _send_all(self, commands: Sequence[str], *, seconds: float) -> list[Reply]:
        """Send commands: all at once, or each after an acceptance of the one before. Returns the replies."""
        lines = [f"{command}\r\n".encode("ascii") for command in commands]
        acceptances = [_CONTENT_EXPECTED if command == "DATA" else _COMPLETED for command in commands]
        if self._pipelines:
            return await self._exchange(b"".join(lines), acceptances, seconds=seconds)
        replies: list[Reply] = []
        for line, acceptance in zip(lines, acceptances, strict=True):
            replies += await self._exchange(line, [acceptance], seconds=seconds)
            if not replies[-1].is_acceptance:
                break
        return replies

    async def _exchange(self, sent: bytes, acceptances: Sequence[range], *, seconds: float) -> list[Reply]:
        """Send something, and return a reply for each of *acceptances*, the codes that accept it.

        NO_REPLY is the last if a reply does not arrive in time, or cannot be one to what was sent: after one
        reply too many, each would be taken for the reply to the next command.
        """
        replies: list[Reply] = []
        try:
            if self._writer.is_closing():
                raise ConnectionResetError  # Writing to a closed connection is a RuntimeError in uvloop.
            self._writer.write(sent)
            async with asyncio.timeout(seconds):
                while len(replies) < len(acceptances):
                    replies.append(await self._read_reply(acceptances[len(replies)]))
        except (OSError, TimeoutError, ValueError):  # ValueError: a line is too long, or no reply to this
            self._writer.close()
            replies.append(Reply(NO_REPLY))
        return replies

    async def _read_reply(self, acceptance: range) -> Reply:
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
                return Reply(code, "\n".join(texts))
        raise ValueError("not in the form of SMTP")
