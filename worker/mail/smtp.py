"""Sends e-mails by SMTP, over connections that are kept."""

import asyncio
import socket
import time
from collections.abc import Callable
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
# If a new connection fails while others are in use, the next one is tried after this time: soon if the mail
# server limits the connections, which it says by 421; later if it refuses the login.
_FULL_SECONDS = 5.0
_REFUSED_SECONDS = 60.0
_QUIT_SECONDS = 1.0


class MailServerUnavailable(Exception):
    """The mail server is unreachable, or refuses the greeting, the login or MAIL.

    This concerns every e-mail, so no attempt is counted.
    """

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.code)
        self.reply = reply


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
        self._idle: list[tuple[float, aiosmtplib.SMTP]] = []  # since when, by this machine's clock
        self._busy = 0  # connections that are being opened, or are sending an e-mail
        self._freed = asyncio.Event()  # A connection is no longer busy.
        self._failure: MailServerUnavailable | None = None  # of the latest connection
        self._full_until = 0.0  # until when no connection is opened while others are busy, after a failure

    def describe(self) -> Attributes:
        """Return the span attributes of the mail server."""
        return {"network.protocol.name": "smtp", "server.address": self._host, "server.port": self._port}

    async def send(
        self, sender: str, recipient: str, content: bytes, *, before_content: Callable[[], None]
    ) -> Reply:
        """Send an e-mail. Returns the first refusal, or the reply to the content.

        *before_content* is called just before the content is sent. If it raises an error, no content is sent.

        If MAIL is refused, this retries once over a new connection, because the server may be going down or
        limit the e-mails per connection. Raises MailServerUnavailable in an outage.
        """
        for is_repeat in (False, True):
            connection = await self._take(is_new=is_repeat)
            is_usable = False
            try:
                reply = await self._send(connection, sender, recipient, content, before_content)
                is_usable = await _is_ready_after(reply, connection)
            finally:
                self._release(connection, is_usable=is_usable)
            if reply.to != "MAIL":
                break
        if reply.fault == "outage":
            raise MailServerUnavailable(reply)
        return reply

    async def _send(
        self,
        connection: aiosmtplib.SMTP,
        sender: str,
        recipient: str,
        content: bytes,
        before_content: Callable[[], None],
    ) -> Reply:
        to = "MAIL"
        try:
            await connection.mail(sender)
            to = "RCPT"
            await connection.rcpt(recipient)
            before_content()
            to = "content"
            response = await connection.data(content, timeout=self._seconds * _CONTENT_PATIENCE)
        except SMTPResponseException as refusal:
            return _reply(to, refusal)
        except (SMTPException, OSError):
            return Reply(to, NO_REPLY)
        return Reply(to, response.code, _readable(response.message))

    async def _take(self, *, is_new: bool) -> aiosmtplib.SMTP:
        """Return an idle connection or, if *is_new* or none is idle, a new one. Raises MailServerUnavailable.

        If a new connection fails while others are in use, wait for one of those.
        """
        while is_new or not self._has_idle():
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
        return self._idle.pop()[1]

    def _has_idle(self) -> bool:
        """Close connections that were idle for long, which a firewall may have dropped silently."""
        stale = [each for since, each in self._idle if time.monotonic() >= since + self._seconds]
        self._idle = [(since, each) for since, each in self._idle if each not in stale and each.is_connected]
        for connection in stale:
            connection.close()
        return bool(self._idle)

    def _release(self, connection: aiosmtplib.SMTP, *, is_usable: bool) -> None:
        self._busy -= 1
        self._freed.set()
        if is_usable:
            self._idle.append((time.monotonic(), connection))
        else:
            connection.close()

    async def close(self) -> None:
        """End every idle connection, within a second."""
        ending = [connection.quit(timeout=_QUIT_SECONDS) for _, connection in self._idle]
        self._idle.clear()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _open(self) -> aiosmtplib.SMTP:
        """Return a new connection, which counts as busy. Raises MailServerUnavailable."""
        self._busy += 1
        connection = None
        try:
            connection = await self.connect()
        except SMTPResponseException as error:
            raise MailServerUnavailable(_reply("connection", error)) from error
        except (SMTPException, OSError, ValueError) as error:
            reply = Reply("connection", NO_REPLY, f"no connection: {logs.summarize(error)}")
            raise MailServerUnavailable(reply) from error
        finally:
            if connection is None:
                self._busy -= 1
                self._freed.set()
        self._failure = None
        return connection

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
                await connection.rset()  # This sends EHLO first, unless connecting has sent it.
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
        if "plain" in connection.supported_auth_methods:
            await connection.auth_plain(username, self._password)
        elif "login" in connection.supported_auth_methods:
            await connection.auth_login(username, self._password)
        else:
            await connection.login(username, self._password)


async def _is_ready_after(reply: Reply, connection: aiosmtplib.SMTP) -> bool:
    """Whether another e-mail may be sent after this reply. After a refusal, reset the connection for it.

    If we are at fault, the next e-mail needs a new connection. The server may apply a mended
    setting to new connections only, and delay a connection that has had many errors.
    """
    if reply.is_acceptance:
        return connection.is_connected
    if reply.to == "MAIL" or reply.ends_session or reply.fault == "sender":
        return False
    try:
        await connection.rset()
    except (SMTPException, OSError):
        return False
    return True


def _reply(to: str, refusal: SMTPResponseException) -> Reply:
    """Return a refusal as a reply. One that cannot belong to the command is none."""
    if refusal.code < 400:
        return Reply(to, NO_REPLY)
    return Reply(to, refusal.code, _readable(refusal.message))


def _readable(text: str) -> str:
    """Return a text of aiosmtplib without the surrogates that stand for bytes that are not UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _name_of_this_machine() -> str:
    """Return this machine's domain name, or its address if the name is bare (RFC 5321, section 4.1.4)."""
    name = socket.getfqdn()
    if "." in name:
        return name
    try:
        return f"[{socket.gethostbyname(socket.gethostname())}]"
    except OSError:
        return "[127.0.0.1]"
