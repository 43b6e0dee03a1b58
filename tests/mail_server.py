"""A real SMTP server in the test's event loop: records what it accepts, and replies as the test sets it."""

import asyncio
import ssl
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import Any, Self
from urllib.parse import quote

import msgspec
from aiosmtpd.smtp import SMTP, AuthResult, Envelope


class Accepted(msgspec.Struct, frozen=True):
    """An e-mail that the server has accepted, and the recipients in its envelope."""

    recipients: list[str]
    message: EmailMessage


class Login(msgspec.Struct, frozen=True):
    """A name and a password."""

    name: str
    password: str


class MailServer:
    """Accepts mail on a free port. A test may set `rcpt_reply` and `data_reply` to refuse it.

    With a context it requires encryption: `smtp+starttls` or `smtps`. With a login it requires that login.
    """

    def __init__(
        self, scheme: str = "smtp", context: ssl.SSLContext | None = None, login: Login | None = None
    ) -> None:
        self._scheme = scheme
        self._context = context
        self._login = login
        self.logins = 0  # successful ones
        self.accepted: list[Accepted] = []
        self.rcpt_reply = "250 OK"
        self.data_reply = "250 OK accepted"
        self.data_delay_seconds = 0.0
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The SMTP_URL of this server."""
        return self.url_for(self._login)

    def url_for(self, login: Login | None) -> str:
        """Return the SMTP_URL of this server with a login."""
        account = f"{quote(login.name, safe='')}:{quote(login.password, safe='')}@" if login else ""
        return f"{self._scheme}://{account}127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, on the same port as before if it was started before."""
        loop = asyncio.get_running_loop()
        is_tls = self._scheme == "smtps"

        def serve() -> SMTP:
            return SMTP(
                self,
                enable_SMTPUTF8=False,
                loop=loop,
                tls_context=None if is_tls else self._context,
                require_starttls=not is_tls,
                authenticator=self._authenticate,
                auth_require_tls=not is_tls,
            )

        self._server = await loop.create_server(
            serve, "127.0.0.1", self.port, ssl=self._context if is_tls else None
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening. Open connections stay open, as when a server drains."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _authenticate(
        self, _server: SMTP, _session: Any, _envelope: Envelope, _mechanism: str, data: Any
    ) -> AuthResult:
        given = Login(data.login.decode(), data.password.decode())
        self.logins += given == self._login
        return AuthResult(success=given == self._login, handled=False)

    async def handle_MAIL(  # noqa: N802 - the name that aiosmtpd calls
        self, _server: SMTP, session: Any, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        """Accept a sender, after a login if one is required."""
        if self._login is not None and not session.authenticated:
            return "530 Authentication required"
        envelope.mail_from = address
        envelope.mail_options.extend(options)
        return "250 OK"

    async def handle_RCPT(  # noqa: N802 - the name that aiosmtpd calls
        self, _server: SMTP, _session: Any, envelope: Envelope, address: str, _options: list[str]
    ) -> str:
        """Accept a recipient, or reply as set."""
        if self.rcpt_reply.startswith("2"):
            envelope.rcpt_tos.append(address)
        return self.rcpt_reply

    async def handle_DATA(self, _server: SMTP, _session: Any, envelope: Envelope) -> str:  # noqa: N802
        """Accept a message, or reply as set."""
        await asyncio.sleep(self.data_delay_seconds)
        if self.data_reply.startswith("2"):
            content = envelope.content
            assert isinstance(content, bytes)
            message = message_from_bytes(content, policy=default)
            assert isinstance(message, EmailMessage)
            self.accepted.append(Accepted(list(envelope.rcpt_tos), message))
        return self.data_reply
