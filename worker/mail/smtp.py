"""Sends e-mails by SMTP, with pipelining over kept connections (RFC 5321, RFC 2920).

aiosmtplib connects, encrypts and logs in. Then a `Session` takes over, because aiosmtplib waits for every
reply before it sends the next command.
"""

import asyncio
import re
import socket
import time
from collections.abc import Callable, Sequence
from typing import cast
from urllib.parse import unquote, urlsplit

import aiosmtplib
from aiosmtplib import SMTPException, SMTPResponseException

from service.telemetry import logs
from service.telemetry.tracing import Attributes
from worker.mail.replies import NO_REPLY, Reply
from worker.settings import EmailSettings

_DEFAULT_PORTS = {"smtp": 25, "smtp+starttls": 587, "smtps": 465}
# The reply to the content may take this many times as long as another reply, because the server filters the
# content first. This allows ten minutes by default (RFC 5321, section 4.5.3.2.6).
_CONTENT_PATIENCE = 10
_REPLY_LINE = re.compile(rb"([2-5][0-9]{2})(?:([- ])(.*))?\r?\n", re.DOTALL)
_MOST_LINES = 100  # of one reply
_LONGEST_LINE = 8 * 1024
# If a new connection fails while others are in use, the next one is tried after this time: soon if the mail
# server limits the connections, which it says by 421; later if it refuses the login.
_FULL_SECONDS = 5.0
_REFUSED_SECONDS = 60.0


class MailServerUnavailable(Exception):
    """The mail server is unreachable, or refuses the greeting, the login or MAIL.

    This concerns every e-mail, so no attempt is counted.
    """

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.code)
        self.reply = reply


class Session:
    """An SMTP session for one e-mail at a time. It ends if a command before the content is refused."""

    def __init__(self, connection: aiosmtplib.SMTP, *, seconds: float) -> None:
        """Take over *connection* after EHLO. From then on nothing else may read from it.

        Each reply must arrive within *seconds*. The reply to the content may take ten times as long.
        """
        if connection.transport is None:
            raise ConnectionResetError
        transport = cast("asyncio.Transport", connection.transport)
        loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._reader = asyncio.StreamReader(limit=_LONGEST_LINE, loop=loop)
        protocol = asyncio.StreamReaderProtocol(self._reader, loop=loop)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        self._writer = asyncio.StreamWriter(transport, protocol, self._reader, loop)
        self._pipelines = connection.supports_extension("pipelining")
        self._between_emails = True
        # Close an idle connection, because a firewall may drop it silently, and an e-mail would wait in vain.
        self._expiry = loop.call_later(seconds, self.close)

    @property
    def is_usable(self) -> bool:
        """Whether another e-mail may be sent."""
        return self._between_emails and not self._writer.is_closing()

    async def send(
        self, sender: str, recipient: str, content: bytes, *, before_content: Callable[[], None]
    ) -> Reply:
        """Send an e-mail, whose lines end with CRLF. Returns the first refusal, or the reply to the content.

        *before_content* is called just before the content is sent. If it raises an error, no content is sent.
        """
        self._between_emails = False
        self._expiry.cancel()
        commands = (f"MAIL FROM:<{sender}>", f"RCPT TO:<{recipient}>", "DATA")
        for together in [commands] if self._pipelines else [[command] for command in commands]:
            lines = "".join(f"{command}\r\n" for command in together).encode("ascii")
            names = [command[:4] for command in together]
            for reply in await self._exchange(lines, names, seconds=self._seconds):
                if not reply.is_acceptance:
                    return reply
        before_content()
        stuffed = re.sub(rb"(?m)^\.", b"..", content) + b".\r\n"
        (reply,) = await self._exchange(stuffed, ["content"], seconds=self._seconds * _CONTENT_PATIENCE)
        self._between_emails = not reply.ends_session
        self._expiry = asyncio.get_running_loop().call_later(self._seconds, self.close)
        return reply

    def close(self) -> None:
        """Close the connection. Between two e-mails, send QUIT first, without waiting for the reply."""
        if self.is_usable:
            self._writer.write(b"QUIT\r\n")
        self._writer.close()

    async def _exchange(self, sent: bytes, commands: Sequence[str], *, seconds: float) -> list[Reply]:
        """Send *commands* as the bytes *sent*, and return the replies.

        If a reply is late or cannot belong to its command, NO_REPLY takes its place, and no later reply is
        read. Otherwise a surplus reply would be taken for the reply to the next command.
        """
        replies: list[Reply] = []
        try:
            if self._writer.is_closing():
                raise ConnectionResetError  # uvloop would raise RuntimeError when writing.
            self._writer.write(sent)
            async with asyncio.timeout(seconds):
                for command in commands:
                    replies.append(await self._read_reply(command))  # noqa: PERF401 - kept if a later one fails
        except (OSError, TimeoutError, ValueError):  # ValueError: a line is too long or does not fit
            self._writer.close()
            replies.append(Reply(commands[len(replies)], NO_REPLY))
        return replies

    async def _read_reply(self, command: str) -> Reply:
        acceptance = 3 if command == "DATA" else 2
        texts: list[str] = []
        while len(texts) < _MOST_LINES:
            line = _REPLY_LINE.fullmatch(await self._reader.readline())
            if line is None:
                break
            texts.append((line[3] or b"").strip().decode(errors="replace"))
            if line[2] != b"-":
                code = int(line[1])
                if code < 400 and code // 100 != acceptance:
                    raise ValueError("a reply to something else")
                return Reply(command, code, "\n".join(texts))
        raise ValueError("not in the form of SMTP")


class Mailer:
    """Sends e-mails over reusable connections, each of which carries one e-mail at a time."""

    def __init__(self, settings: EmailSettings) -> None:
        url = urlsplit(settings.smtp_url)
        self._host = url.hostname or "localhost"
        self._port = url.port or _DEFAULT_PORTS[url.scheme]
        self._scheme = url.scheme
        self._username = unquote(url.username) if url.username else None
        self._password = unquote(url.password or "")
        self._seconds = settings.smtp_timeout_seconds
        self._greeting_name = settings.smtp_helo_name
        self._idle: list[Session] = []
        self._busy = 0  # sessions that are being opened, or are sending an e-mail
        self._freed = asyncio.Event()  # A session is no longer busy.
        self._failure: MailServerUnavailable | None = None  # of the latest connection
        self._full_until = 0.0  # until when no connection is opened while others are busy, after a failure

    def describe(self) -> Attributes:
        """Return the span attributes of the mail server."""
        return {"network.protocol.name": "smtp", "server.address": self._host, "server.port": self._port}

    async def send(
        self, sender: str, recipient: str, content: bytes, *, before_content: Callable[[], None]
    ) -> Reply:
        """Send an e-mail, and return the reply that accepted or refused it, as `Session.send` does.

        If MAIL is refused, or RCPT or DATA gets 421 or no reply, this retries once over a new connection,
        because the server may be going down or limit the e-mails per connection. This cannot send the e-mail
        twice. Raises MailServerUnavailable in an outage.
        """
        for is_repeat in (False, True):
            session = await self._take(is_new=is_repeat)
            try:
                reply = await session.send(sender, recipient, content, before_content=before_content)
            finally:
                self._release(session)
            if reply.to == "content" or (reply.to != "MAIL" and not reply.ends_session):
                break
        if reply.fault == "outage":
            raise MailServerUnavailable(reply)
        return reply

    async def _take(self, *, is_new: bool) -> Session:
        """Return an idle session or, if *is_new* or none is idle, a new one. Raises MailServerUnavailable.

        If a new connection fails while others are in use, wait for one of those.
        """
        while is_new or not self._idle:
            is_new = False
            if self._busy == 0 or time.monotonic() >= self._full_until:
                if self._failure is not None:  # Let the others wait while this one tries.
                    self._full_until = time.monotonic() + _FULL_SECONDS
                try:
                    return await self._open()
                except MailServerUnavailable as failure:
                    seconds = _FULL_SECONDS if failure.reply.ends_session else _REFUSED_SECONDS
                    self._failure, self._full_until = failure, time.monotonic() + seconds
            if self._busy:
                self._freed.clear()
                await self._freed.wait()
            if self._failure is not None and not (self._busy or self._idle):
                raise MailServerUnavailable(self._failure.reply)
        self._busy += 1
        return self._idle.pop()

    def _release(self, session: Session) -> None:
        self._busy -= 1
        self._freed.set()
        if session.is_usable:
            self._idle.append(session)
        else:
            session.close()

    def close(self) -> None:
        """Close every idle connection."""
        for session in self._idle:
            session.close()
        self._idle.clear()

    async def _open(self) -> Session:
        """Return a session over a new connection, which counts as busy. Raises MailServerUnavailable."""
        self._busy += 1
        try:
            connection = await self.connect()
            try:
                await connection.rset()  # This sends EHLO first, unless connecting has sent it.
                session = Session(connection, seconds=self._seconds)
            except BaseException:
                connection.close()
                raise
        except BaseException as error:
            self._busy -= 1
            self._freed.set()
            if isinstance(error, SMTPResponseException):
                reply = Reply("connection", error.code, error.message)
            elif isinstance(error, (SMTPException, OSError, ValueError)):
                reply = Reply("connection", NO_REPLY, f"no connection: {logs.summarize(error)}")
            else:
                raise
            raise MailServerUnavailable(reply) from error
        self._failure = None
        return session

    async def connect(self) -> aiosmtplib.SMTP:
        """Return a new connection, encrypted and logged in as SMTP_URL says. Raises aiosmtplib's errors."""
        self._greeting_name = self._greeting_name or await asyncio.to_thread(_name_of_this_machine)
        connection = aiosmtplib.SMTP(
            hostname=self._host,
            port=self._port,
            use_tls=self._scheme == "smtps",
            # Never None: aiosmtplib would use STARTTLS only if offered, and an attacker can hide the offer.
            start_tls=self._scheme == "smtp+starttls",
            timeout=self._seconds,
            local_hostname=self._greeting_name,
        )
        try:
            async with asyncio.timeout(self._seconds):
                await connection.connect()
                if self._username is not None:
                    await self._log_in(connection, self._username)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _log_in(self, connection: aiosmtplib.SMTP, username: str) -> None:
        """Log in by one mechanism, because a provider may count each refusal and then ban this client.

        `connection.login` would try all that are offered. PLAIN is the one that all servers must have with
        TLS (RFC 4954, section 4).
        """
        if connection.is_ehlo_or_helo_needed:
            await connection.ehlo()
        if "plain" in connection.supported_auth_methods:
            await connection.auth_plain(username, self._password)
        elif "login" in connection.supported_auth_methods:
            await connection.auth_login(username, self._password)
        else:
            await connection.login(username, self._password)


def _name_of_this_machine() -> str:
    """Return this machine's domain name, or its address if the name is bare (RFC 5321, section 4.1.4)."""
    name = socket.getfqdn()
    if "." in name:
        return name
    try:
        return f"[{socket.gethostbyname(socket.gethostname())}]"
    except OSError:
        return "[127.0.0.1]"
