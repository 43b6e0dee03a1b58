"""SMTP servers in the test's own loop: aiosmtpd's, which is correct, and a scripted one, which may not be.

Two, because the product has to be tried against an implementation that checks what it is sent, and no such
implementation sends wrong replies.
"""

import asyncio
import ssl
import time
from collections import Counter
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from typing import Any, NamedTuple
from urllib.parse import quote
from warnings import catch_warnings

from aiosmtpd.smtp import SMTP, AuthResult, Envelope

from tests.harness.loopback_server import LoopbackServer

ACCEPTED = b"250 OK accepted"
_USUAL_REPLIES = dict.fromkeys(("EHLO", "MAIL", "RCPT", "RSET"), b"250 OK") | {
    "greeting": b"220 mail.example.com ESMTP",
    "DATA": b"354 Go ahead",
    "content": ACCEPTED,
    "QUIT": b"221 Bye",
}


class Accepted(NamedTuple):
    recipients: list[str]  # in its envelope
    message: EmailMessage


class Login(NamedTuple):
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
        self._scheme, self._login = scheme, login
        self.logins = 0  # that succeeded
        self.accepted: list[Accepted] = []
        self.rcpt_reply = "250 OK"
        self.data_reply = "250 OK accepted"
        self.url = self.url_for(login)

    def url_for(self, login: Login | None) -> str:
        account = f"{quote(login.name, safe='')}:{quote(login.password, safe='')}@" if login else ""
        return f"{self._scheme}://{account}127.0.0.1:{self.port}"

    async def start(self) -> None:
        loop, is_tls = asyncio.get_running_loop(), self._scheme == "smtps"

        def serve() -> SMTP:
            with catch_warnings(action="ignore"):  # It does not know that the connection has TLS already.
                return SMTP(
                    self,
                    enable_SMTPUTF8=False,
                    loop=loop,
                    tls_context=None if is_tls else self._context,
                    require_starttls=not is_tls,
                    authenticator=self._authenticate,
                    auth_required=self._login is not None,
                    auth_require_tls=not is_tls,
                )

        context = self._context if is_tls else None
        self._listening = await loop.create_server(serve, "127.0.0.1", self.port, ssl=context)

    def _authenticate(self, *given: Any) -> AuthResult:
        is_accepted = Login(given[-1].login.decode(), given[-1].password.decode()) == self._login
        self.logins += is_accepted
        return AuthResult(success=is_accepted, handled=False)

    async def handle_RCPT(  # noqa: N802 - aiosmtpd's name
        self, _server: SMTP, _session: Any, envelope: Envelope, address: str, _options: list[str]
    ) -> str:
        if self.rcpt_reply.startswith("2"):
            envelope.rcpt_tos.append(address)
        return self.rcpt_reply

    async def handle_DATA(self, _server: SMTP, _session: Any, envelope: Envelope) -> str:  # noqa: N802
        if self.data_reply.startswith("2"):
            assert isinstance(envelope.content, bytes)
            message = message_from_bytes(envelope.content, policy=policy.default)
            self.accepted.append(Accepted(list(envelope.rcpt_tos), message))
        return self.data_reply


@dataclass(eq=False)
class Session:
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
        self.url = f"smtp://127.0.0.1:{self.port}"
        self.replies: dict[str, bytes | None] = {**_USUAL_REPLIES}
        self.contents: list[bytes] = []  # of every e-mail that was sent, whatever the reply
        self.connections = 0  # accepted so far
        self.commands: Counter[str] = Counter()  # how often each was sent

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
