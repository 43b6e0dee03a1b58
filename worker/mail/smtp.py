"""Sends e-mails by SMTP, over connections that are kept for the next one."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import unquote, urlsplit

import aiosmtplib
import msgspec
from aiosmtplib import SMTPDataError, SMTPException, SMTPRecipientRefused

from service.telemetry.spans import Attributes
from worker.settings import WorkerSettings

_DEFAULT_PORTS = {"smtp": 25, "smtp+starttls": 587, "smtps": 465}
_SERVICE_NOT_AVAILABLE = 421
NO_REPLY = 0  # in place of the reply code that the mail server did not send
_LONGEST_REPLY = 1000


class MailServerUnavailable(Exception):
    """The mail server is unreachable, or accepts no mail at all, such as after a refused login.

    The e-mail is not at fault, so no attempt is charged. A refused login or sender address is an outage too:
    it concerns every e-mail, and must lose none.
    """


class EmailRefused(Exception):
    """The mail server refused this e-mail, for now (4xx, NO_REPLY) or for good (5xx to RCPT or DATA).

    NO_REPLY: the connection was lost twice at RCPT, or once while the content was sent, which the server may
    then have accepted. Both charge an attempt.
    """

    def __init__(self, code: int, reply: str) -> None:
        super().__init__(code)
        self.code = code
        self.reply = reply

    @property
    def is_final(self) -> bool:
        """Whether another attempt would be refused too (RFC 5321, section 4.2.1)."""
        return self.code >= 500


class _SessionEnded(Exception):
    """The mail server ended the session, or broke the protocol, before it was given the content."""

    def __init__(self, verdict: EmailRefused | MailServerUnavailable) -> None:
        super().__init__()
        self.verdict = verdict  # the exception to raise when it does so again


class Envelope(msgspec.Struct, frozen=True):
    """The addresses by which the mail server delivers."""

    sender: str
    recipient: str


class Mailer:
    """Sends e-mails over connections that each carry one e-mail at a time, and are kept for the next."""

    def __init__(self, settings: WorkerSettings) -> None:
        url = urlsplit(settings.smtp_url)
        self._host = url.hostname or "localhost"
        self._port = url.port or _DEFAULT_PORTS[url.scheme]
        self._scheme = url.scheme
        self._username = unquote(url.username) if url.username else None
        self._password = unquote(url.password) if url.password else None
        self._timeout_seconds = settings.smtp_timeout_seconds
        self._answer_seconds = settings.smtp_answer_seconds
        self._idle: list[aiosmtplib.SMTP] = []

    def describe(self) -> Attributes:
        """Return the span attributes of the mail server."""
        return {
            "network.protocol.name": "smtp",
            "server.address": self._host,
            "server.port": self._port,
        }

    async def send(self, envelope: Envelope, content: bytes, *, before_content: Callable[[], None]) -> str:
        """Return the mail server's reply on acceptance. Raises EmailRefused or MailServerUnavailable.

        *before_content* is called just before the content is sent. It may raise to withhold the content.

        A server that ends the session may be going down, or limit what it takes over one connection. So the
        e-mail is sent once more, over a new connection. If the server accepts the connection and ends the
        session at this recipient again, the e-mail is at fault.
        """
        connection = await self._reuse() or await self._open()
        try:
            return await self._send_over(connection, envelope, content, before_content)
        except _SessionEnded:
            connection = await self._open()
        try:
            return await self._send_over(connection, envelope, content, before_content)
        except _SessionEnded as error:
            raise error.verdict from error.__cause__

    async def _send_over(
        self,
        connection: aiosmtplib.SMTP,
        envelope: Envelope,
        content: bytes,
        before_content: Callable[[], None],
    ) -> str:
        """Send over a connection. Keep it if the mail server accepted or refused the e-mail."""
        kept = False
        try:
            await self._address(connection, envelope)
            before_content()
            reply = await self._send_content(connection, content)
            kept = True
        except EmailRefused:
            kept = True
            raise
        finally:
            if kept and connection.is_connected:
                self._idle.append(connection)
            else:
                connection.close()
        return _storable(reply)

    async def _address(self, connection: aiosmtplib.SMTP, envelope: Envelope) -> None:
        """Send MAIL and RCPT. The sender is the same for every e-mail, so its refusal is an outage."""
        try:
            await connection.mail(envelope.sender)
        except (SMTPException, OSError) as error:
            raise _SessionEnded(MailServerUnavailable()) from error
        try:
            await connection.rcpt(envelope.recipient)
        except (SMTPException, OSError) as error:
            refusal = _refusal(error, without_reply="the mail server ended the session at the recipient")
            if isinstance(error, SMTPRecipientRefused) and error.code != _SERVICE_NOT_AVAILABLE:
                raise refusal from None
            raise _SessionEnded(refusal) from error

    async def _send_content(self, connection: aiosmtplib.SMTP, content: bytes) -> str:
        """Send the content. Without a reply it is unknown whether it was accepted: an attempt is charged."""
        try:
            response = await connection.data(content, timeout=self._answer_seconds)
        except (SMTPException, OSError) as error:
            if not isinstance(error, SMTPDataError):
                connection.close()
            without_reply = "no reply to the content; it may have been accepted"
            raise _refusal(error, without_reply=without_reply) from None
        return response.message

    async def close(self) -> None:
        """Close every idle connection with QUIT."""
        while self._idle:
            with suppress(SMTPException, OSError):
                await self._idle.pop().quit(timeout=1.0)

    async def _open(self) -> aiosmtplib.SMTP:
        """Return a new connection. Raises MailServerUnavailable."""
        try:
            return await self.connect()
        except (SMTPException, OSError, ValueError) as error:
            raise MailServerUnavailable from error

    async def _reuse(self) -> aiosmtplib.SMTP | None:
        """Return an idle connection that still replies, or None."""
        while self._idle:
            connection = self._idle.pop()
            try:
                await connection.rset(timeout=5.0)
            except (SMTPException, OSError):
                connection.close()
            else:
                return connection
        return None

    async def connect(self) -> aiosmtplib.SMTP:
        """Return a new connection, encrypted and logged in as SMTP_URL says. Raises as aiosmtplib does."""
        connection = aiosmtplib.SMTP(
            hostname=self._host,
            port=self._port,
            username=self._username,
            password=self._password,
            use_tls=self._scheme == "smtps",
            # Never None, which uses STARTTLS only if offered: an attacker on the way can hide the offer.
            start_tls=self._scheme == "smtp+starttls",
            timeout=self._timeout_seconds,
            local_hostname=socket.gethostname(),
        )
        async with asyncio.timeout(self._timeout_seconds):
            await connection.connect()
        return connection


def _refusal(error: Exception, *, without_reply: str) -> EmailRefused:
    if isinstance(error, SMTPRecipientRefused | SMTPDataError):
        return EmailRefused(error.code, _storable(f"{error.code} {error.message}"))
    return EmailRefused(NO_REPLY, without_reply)


def _storable(reply: str) -> str:
    """Return a reply as text that Postgres accepts: a mail server may use any encoding, and NULs."""
    text = reply.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")[:_LONGEST_REPLY]
