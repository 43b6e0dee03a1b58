"""Sends e-mails by SMTP, over connections that are kept for the next one."""

import asyncio
import socket
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

import aiosmtplib
from aiosmtplib import SMTPException, SMTPResponseException

from service.telemetry.tracing import Attributes
from worker.mail.session import NO_REPLY, Reply, Session
from worker.settings import WorkerSettings

_DEFAULT_PORTS = {"smtp": 25, "smtp+starttls": 587, "smtps": 465}


class MailServerUnavailable(Exception):
    """The mail server is unreachable, or accepts no mail at all, such as after a refused login.

    The e-mail is not at fault, so no attempt is charged. A refused login or sender address is an outage too:
    it concerns every e-mail, and must lose none.
    """

    def __init__(self, code: int = NO_REPLY) -> None:
        super().__init__(code)
        self.code = code


class Mailer:
    """Sends e-mails over connections that each carry one e-mail at a time, and are kept for the next."""

    def __init__(self, settings: WorkerSettings) -> None:
        url = urlsplit(settings.smtp_url)
        self._host = url.hostname or "localhost"
        self._port = url.port or _DEFAULT_PORTS[url.scheme]
        self._scheme = url.scheme
        self._username = unquote(url.username) if url.username else None
        self._password = unquote(url.password) if url.password else None
        self._seconds = settings.smtp_timeout_seconds
        self._idle: list[Session] = []

    def describe(self) -> Attributes:
        """Return the span attributes of the mail server."""
        return {
            "network.protocol.name": "smtp",
            "server.address": self._host,
            "server.port": self._port,
        }

    async def send(
        self, sender: str, recipient: str, content: bytes, *, before_content: Callable[[], None]
    ) -> Reply:
        """Return the reply with which the mail server accepted or refused an e-mail, as `Session.send` does.

        A server that ends the session may be going down, or limit what it takes over one connection. So the
        e-mail is sent once more, over a new connection. If the server accepts the connection and ends the
        session at RCPT or DATA again, the e-mail is at fault.

        Raises MailServerUnavailable, also for a refused sender: it is the same for every e-mail.
        """
        for idle in (self._reuse(), None):
            session = idle or await self._open()
            try:
                reply = await session.send(sender, recipient, content, before_content=before_content)
            finally:
                if session.is_usable:
                    self._idle.append(session)
                else:
                    session.close()
            if not reply.concerns_session:
                return reply
        if reply.to == "MAIL":
            raise MailServerUnavailable(reply.code)
        return reply

    async def close(self) -> None:
        """Close every idle connection with QUIT, all at once."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(session.quit() for session in idle))

    def _reuse(self) -> Session | None:
        """Return an idle session, or None. If the mail server has ended it, it fails at once."""
        while self._idle:
            session = self._idle.pop()
            if session.is_usable:
                return session
            session.close()
        return None

    async def _open(self) -> Session:
        """Return a session over a new connection. Raises MailServerUnavailable."""
        try:
            connection = await self.connect()
            try:
                await connection.rset()  # after EHLO, which connecting alone may not have sent
                return Session(connection, seconds=self._seconds)
            except BaseException:
                connection.close()
                raise
        except SMTPResponseException as error:
            raise MailServerUnavailable(error.code) from error
        except (SMTPException, OSError, ValueError) as error:
            raise MailServerUnavailable from error

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
            timeout=self._seconds,
            local_hostname=socket.gethostname(),
        )
        async with asyncio.timeout(self._seconds):
            await connection.connect()
        return connection
