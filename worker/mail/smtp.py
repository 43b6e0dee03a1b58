"""Sends e-mails by SMTP."""

import asyncio
import socket
from collections.abc import Awaitable
from contextlib import suppress
from urllib.parse import unquote, urlsplit

import aiosmtplib
from aiosmtplib import SMTPException, SMTPResponse, SMTPResponseException, SMTPServerDisconnected

from service.addresses import connect_to_any
from service.command_line.connecting import reason
from service.telemetry.tracing import Attributes
from worker.mail.replies import NO_REPLY, Reply, storable
from worker.settings import EmailSettings

_DEFAULT_PORTS = {"smtp": 25, "smtp+starttls": 587, "smtps": 465}
# The replies to DATA and to the content may take this many times as long as others, because the server
# filters the content first. This allows ten minutes by default (RFC 5321, section 4.5.3.2.6).
_CONTENT_PATIENCE = 10
_QUIT_SECONDS = 1.0


class MailServerUnavailable(Exception):
    """The mail server takes no e-mail now: no attempt is counted."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.code)
        self.reply = reply


class Session:
    """A connection to the mail server. The first e-mail has begun: MAIL was accepted."""

    def __init__(self, connection: aiosmtplib.SMTP, sender: str, seconds: float) -> None:
        self._connection = connection
        self._sender = sender
        self._seconds = seconds
        self._latest = Reply("MAIL", 250)

    @property
    def is_reusable(self) -> bool:
        """Whether another e-mail may be sent over the connection.

        Not after a refusal, or a recipient without content: the next e-mail might go to this recipient, too.
        """
        return self._latest.to != "RCPT" and self._latest.is_acceptance

    async def begin(self) -> bool:
        """Begin an e-mail by MAIL, unless it has begun. Returns whether the mail server accepted it."""
        if self._latest.to != "MAIL":
            await self._run("MAIL", self._connection.mail(self._sender))
        return self._latest.is_acceptance

    async def name_recipient(self, recipient: str) -> Reply:
        """Name the e-mail's recipient by RCPT. Returns the reply."""
        return await self._run("RCPT", self._connection.rcpt(recipient))

    async def send(self, content: bytes) -> Reply:
        """Send the content. Returns the reply to it, or the refusal of DATA."""
        return await self._run(
            "content", self._connection.data(content, timeout=self._seconds * _CONTENT_PATIENCE)
        )

    async def _run(self, to: str, command: Awaitable[SMTPResponse]) -> Reply:
        try:
            response = await command
            self._latest = Reply(to, response.code, storable(response.message))
        except Exception as error:  # noqa: BLE001 - whatever it is, the session ends
            self._latest = _reply(to, error)
        return self._latest

    async def end(self) -> None:
        """Close the connection, in order if the mail server still replies."""
        with suppress(SMTPException, OSError):
            await self._connection.quit(timeout=_QUIT_SECONDS)
        self._connection.close()


class Mailer:
    """Connects to the mail server, as SMTP_URL says."""

    def __init__(self, settings: EmailSettings) -> None:
        url = urlsplit(settings.smtp_url)
        self._host = url.hostname or "localhost"
        self._port = url.port or _DEFAULT_PORTS[url.scheme]
        self._scheme = url.scheme
        self._username = unquote(url.username) if url.username else None
        self._password = unquote(url.password or "")
        self._seconds = settings.smtp_timeout_seconds
        self._greeting_name = settings.smtp_helo_name

    def describe(self) -> Attributes:
        """Return the span attributes of the mail server."""
        return {"network.protocol.name": "smtp", "server.address": self._host, "server.port": self._port}

    async def open_session(self, sender: str) -> Session:
        """Connect, and begin an e-mail from this address by MAIL. Raises MailServerUnavailable."""
        to, connection = "connection", None
        try:
            connection = await self.connect()
            to = "MAIL"
            await connection.mail(sender)
        except Exception as error:  # Whatever it is, the next connection must wait.
            if connection is not None:
                connection.close()
            raise MailServerUnavailable(_reply(to, error)) from error
        return Session(connection, sender, self._seconds)

    async def connect(self) -> aiosmtplib.SMTP:
        """Return a new connection, encrypted and logged in. Raises aiosmtplib's errors."""
        self._greeting_name = self._greeting_name or await asyncio.to_thread(_name_of_this_machine)
        connection = await connect_to_any(self._greet, seconds=self._seconds)
        if self._username is not None:
            await self._log_in(connection, self._username)
        return connection

    async def _greet(self) -> aiosmtplib.SMTP:
        connection = aiosmtplib.SMTP(
            hostname=self._host,
            port=self._port,
            use_tls=self._scheme == "smtps",
            # Never None: aiosmtplib would use STARTTLS only if offered, and an attacker can hide the offer.
            start_tls=self._scheme == "smtp+starttls",
            timeout=self._seconds,
            local_hostname=self._greeting_name,
        )
        await connection.connect()
        return connection

    async def _log_in(self, connection: aiosmtplib.SMTP, username: str) -> None:
        """Log in by one mechanism, because a provider may count each refusal, and ban this client.

        `connection.login` would try all. With TLS, all servers must have PLAIN (RFC 4954, section 4).
        """
        try:
            await connection.ehlo()
            if "plain" in connection.supported_auth_methods:
                await connection.auth_plain(username, self._password)
            else:
                await connection.auth_login(username, self._password)
        except BaseException:
            connection.close()
            raise


def _reply(to: str, error: Exception) -> Reply:
    """Return why a command failed, as a reply. A code below 400 refuses nothing, so it counts as no reply."""
    if isinstance(error, SMTPResponseException) and error.code >= 400:
        return Reply(to, error.code, storable(error.message))
    missing = to if to == "connection" else f"reply to {to}"
    why = reason(error).replace(SMTPServerDisconnected.__name__, "the connection was lost")
    return Reply(to, NO_REPLY, f"no {missing}: {why}")


def _name_of_this_machine() -> str:
    """Return this machine's domain name, or its address if the name is bare (RFC 5321, section 4.1.4)."""
    name = socket.getfqdn()
    if "." in name:
        return name
    try:
        return f"[{socket.gethostbyname(socket.gethostname())}]"
    except OSError:
        return "[127.0.0.1]"
