"""SMTP servers in the test's own loop: aiosmtpd's, which is correct, and a scripted one, which may not be.

Two, because the product has to be tried against an implementation that checks what it is sent, and no such
implementation sends wrong replies.
"""

import asyncio
import ssl
import time
from collections import Counter
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import Any
from urllib.parse import quote

import msgspec
from aiosmtpd.smtp import SMTP, AuthResult, Envelope

from tests.harness.loopback_server import LoopbackServer

ACCEPTED = b"250 OK accepted"
_USUAL_REPLIES = {
    "greeting": b"220 mail.example.com ESMTP",
    "EHLO": b"250 mail.example.com",
    "MAIL": b"250 OK",
    "RCPT": b"250 OK",
    "DATA": b"354 Go ahead",
    "content": ACCEPTED,
    "RSET": b"250 OK",
    "QUIT": b"221 Bye",
}


class Accepted(msgspec.Struct, frozen=True):
    """An accepted e-mail, and the recipients in its envelope."""

    recipients: list[str]
    message: EmailMessage


class Login(msgspec.Struct, frozen=True):
    name: str
    password: str


class MailServer(LoopbackServer):
    """Accepts mail and records it. `rcpt_reply` and `data_reply` may be set to refuse.

    With a context it requires TLS (`smtp+starttls` or `smtps`), with a login it requires that login. Open
    connections outlive `stop`, as with a server that drains.
    """

    def __init__(
        self, scheme: str = "smtp", context: ssl.SSLContext | None = None, login: Login | None = None
    ) -> None:
        super().__init__(context)
        self._scheme = scheme
        self._login = login
        self.logins = 0  # that succeeded
        self.accepted: list[Accepted] = []
        self.rcpt_reply = "250 OK"
        self.data_reply = "250 OK accepted"

    @property
    def url(self) -> str:
        return self.url_for(self._login)

    def url_for(self, login: Login | None) -> str:
        account = f"{quote(login.name, safe='')}:{quote(login.password, safe='')}@" if login else ""
        return f"{self._scheme}://{account}127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, always on the same port."""
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

        context = self._context if is_tls else None
        self._listening = await loop.create_server(serve, "127.0.0.1", self.port, ssl=context)

    def _authenticate(
        self, _server: SMTP, _session: Any, _envelope: Envelope, _mechanism: str, data: Any
    ) -> AuthResult:
        given = Login(data.login.decode(), data.password.decode())
        is_accepted = given == self._login
        self.logins += is_accepted
        return AuthResult(success=is_accepted, handled=False)

    async def handle_MAIL(  # noqa: N802 - aiosmtpd's name
        self, _server: SMTP, session: Any, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if self._login is not None and not session.authenticated:
            return "530 Authentication required"
        envelope.mail_from = address
        envelope.mail_options.extend(options)
        return "250 OK"

    async def handle_RCPT(  # noqa: N802 - aiosmtpd's name
        self, _server: SMTP, _session: Any, envelope: Envelope, address: str, _options: list[str]
    ) -> str:
        if self.rcpt_reply.startswith("2"):
            envelope.rcpt_tos.append(address)
        return self.rcpt_reply

    async def handle_DATA(self, _server: SMTP, _session: Any, envelope: Envelope) -> str:  # noqa: N802
        if self.data_reply.startswith("2"):
            content = envelope.content
            assert isinstance(content, bytes)
            message = message_from_bytes(content, policy=default)
            assert isinstance(message, EmailMessage)
            self.accepted.append(Accepted(list(envelope.rcpt_tos), message))
        return self.data_reply


@dataclass(eq=False)
class Session:
    """One connection to a `ScriptedMailServer`."""

    connected_at: float = field(default_factory=time.monotonic)
    sender: str = ""  # the name in its EHLO
    closes_after_reply: bool = False
    recipient: bytes = b""  # the RCPT of the e-mail that is being sent, once it was accepted


class ScriptedMailServer(LoopbackServer):
    """Replies from a table, right or wrong.

    `replies` has the reply to each command, to a new connection (`greeting`) and to the end of an e-mail
    (`content`). None closes the connection instead of a reply.
    """

    longest_bytes = 1 << 20  # of an e-mail

    def __init__(self) -> None:
        super().__init__()
        self.replies: dict[str, bytes | None] = {**_USUAL_REPLIES}
        self.contents: list[bytes] = []  # of every e-mail that was sent, whatever the reply
        self.connections = 0  # accepted so far
        self.commands: Counter[str] = Counter()  # how often each was sent

    @property
    def url(self) -> str:
        return f"smtp://127.0.0.1:{self.port}"

    async def reply_to(self, _session: Session, command: str, _sent: bytes) -> bytes | None:
        """Return the reply to a command, or to `greeting` or `content`."""
        return self.replies[command]

    async def _reply_in_sequence(self, session: Session, line: bytes) -> bytes | None:
        """Return the reply to a command. DATA needs a recipient that was accepted."""
        command = line[:4].decode().strip().upper()
        self.commands[command] += 1
        if command == "EHLO":
            session.sender = line[5:].decode().strip()
        if command == "DATA" and not session.recipient:
            return b"503 No recipient"
        reply = await self.reply_to(session, command, line)
        if command != "DATA":
            is_accepted = command == "RCPT" and reply is not None and reply.startswith(b"2")
            session.recipient = line if is_accepted else b""
        return reply

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reply to one client."""
        self.connections += 1
        session = Session()
        reply = await self.reply_to(session, "greeting", b"")
        while reply is not None:
            writer.write(reply + b"\r\n")
            await writer.drain()
            if session.closes_after_reply:
                return
            if reply.splitlines()[-1][3:4] == b"-":  # The last line never comes.
                await reader.read()
                return
            if reply.startswith(b"354"):
                self.contents.append(await reader.readuntil(b"\r\n.\r\n"))
                reply = await self.reply_to(session, "content", self.contents[-1])
            else:
                reply = await self._reply_in_sequence(session, await reader.readuntil(b"\r\n"))
