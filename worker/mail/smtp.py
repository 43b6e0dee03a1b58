"""Sends e-mails by SMTP, over connections that are kept for the next one."""

import asyncio
import socket
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

import aiosmtplib
import msgspec
from aiosmtplib import SMTPException, SMTPResponseException

from service.telemetry.tracing import Attributes
from worker.mail.session import NO_REPLY, Reply, Session
from worker.settings import WorkerSettings

# Replies to MAIL or to the content of providers that limit how many e-mails they take, or over how many
# connections. To RCPT, 454 refuses one recipient, as in Postfix's "454 4.7.1 Relay access denied".
_THROTTLING = frozenset({432, 454})
_DEFAULT_PORTS = {"smtp": 25, "smtp+starttls": 587, "smtps": 465}
_LONGEST_REPLY = 1000


class MailServerUnavailable(Exception):
    """The mail server is unreachable, or accepts no mail at all, such as after a refused login.

    The e-mail is not at fault, so no attempt is charged. A refused login or sender address is an outage too:
    it concerns every e-mail, and must lose none.
    """

    def __init__(self, code: int = NO_REPLY) -> None:
        super().__init__(code)
        self.code = code


class MailThrottled(Exception):
    """The mail server limits how many e-mails it takes, and did not take this one. No attempt is charged."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class EmailRefused(Exception):
    """The mail server refused this e-mail, for now (4xx, NO_REPLY) or for good (5xx to RCPT or DATA).

    NO_REPLY: the connection was lost twice at RCPT or DATA, or once while the content was sent, which the
    server may then have accepted. Both charge an attempt.
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
        self._idle: list[Session] = []

    def describe(self) -> Attributes:
        """Return the span attributes of the mail server."""
        return {
            "network.protocol.name": "smtp",
            "server.address": self._host,
            "server.port": self._port,
        }

    async def send(self, envelope: Envelope, content: bytes, *, before_content: Callable[[], None]) -> str:
        """Return the mail server's reply on acceptance.

        Raises EmailRefused, MailThrottled or MailServerUnavailable.

        *before_content* is called just before the content is sent. It may raise to withhold the content.

        A server that ends the session may be going down, or limit what it takes over one connection. So the
        e-mail is sent once more, over a new connection. If the server accepts the connection and ends the
        session at RCPT or DATA again, the e-mail is at fault.
        """
        session = self._reuse() or await self._open()
        try:
            return await self._send_over(session, envelope, content, before_content)
        except _SessionEnded:
            session = await self._open()
        try:
            return await self._send_over(session, envelope, content, before_content)
        except _SessionEnded as error:
            raise error.verdict from None

    async def _send_over(
        self, session: Session, envelope: Envelope, content: bytes, before_content: Callable[[], None]
    ) -> str:
        """Send over a session. Keep it if the mail server accepted or refused the e-mail."""
        try:
            await self._address(session, envelope)
            before_content()
            reply = await session.finish(content, seconds=self._answer_seconds)
            if reply.code in _THROTTLING:
                raise MailThrottled(reply.code)
            if not reply.is_acceptance:
                # Without a reply it is unknown whether it was accepted: an attempt is charged.
                raise _refusal(reply, without_reply="no reply to the content; it may have been accepted")
            return _storable(reply.text)
        finally:
            if session.is_usable:
                self._idle.append(session)
            else:
                session.close()

    async def _address(self, session: Session, envelope: Envelope) -> None:
        """Send MAIL, RCPT and DATA. The sender is the same for every e-mail, so its refusal is an outage."""
        replies = await session.begin(envelope.sender, envelope.recipient, seconds=self._timeout_seconds)
        last = replies[-1]
        if last.is_acceptance:
            return
        if len(replies) == 1:
            if last.code in _THROTTLING:
                raise MailThrottled(last.code)
            raise _SessionEnded(MailServerUnavailable(last.code))
        refusal = _refusal(last, without_reply="the mail server ended the session before the content")
        raise _SessionEnded(refusal) if last.ends_session else refusal

    async def close(self) -> None:
        """Close every idle connection with QUIT, all at once."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(session.quit() for session in idle))

    async def _open(self) -> Session:
        """Return a session over a new connection. Raises MailServerUnavailable."""
        try:
            connection = await self.connect()
            try:
                await connection.rset()  # after EHLO, which connecting alone may not have sent
                return Session(connection)
            except BaseException:
                connection.close()
                raise
        except SMTPResponseException as error:
            raise MailServerUnavailable(error.code) from error
        except (SMTPException, OSError, ValueError) as error:
            raise MailServerUnavailable from error

    def _reuse(self) -> Session | None:
        """Return an idle session, or None. If the mail server has ended it, it fails at once."""
        while self._idle:
            session = self._idle.pop()
            if session.is_usable:
                return session
            session.close()
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


def _refusal(reply: Reply, *, without_reply: str) -> EmailRefused:
    text = _storable(f"{reply.code} {reply.text}") if reply.code else without_reply
    return EmailRefused(reply.code, text)


def _storable(reply: str) -> str:
    """Return a reply as text that Postgres accepts: a mail server may use any encoding, and NULs."""
    text = reply.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")[:_LONGEST_REPLY]
