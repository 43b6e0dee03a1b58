"""A real SMTP server in the test's own loop: it records what it accepts, and answers as told."""

import asyncio
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import Any, Self

import msgspec
from aiosmtpd.smtp import SMTP, Envelope


class Accepted(msgspec.Struct, frozen=True):
    """An e-mail that the server has accepted, and to whom its envelope was addressed."""

    recipients: list[str]
    message: EmailMessage


class MailServer:
    """Accepts mail on a port of its own. `rcpt_reply` and `data_reply` may be set to refuse."""

    def __init__(self) -> None:
        self.accepted: list[Accepted] = []
        self.rcpt_reply = "250 OK"
        self.data_reply = "250 OK accepted"
        self.data_delay_seconds = 0.0
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The SMTP_URL of this server."""
        return f"smtp://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: SMTP(self, enable_SMTPUTF8=False, loop=loop), "127.0.0.1", self.port
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening. Connections that are open stay so, as with a server that drains."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def handle_RCPT(  # noqa: N802 - aiosmtpd calls it so
        self, _server: SMTP, _session: Any, envelope: Envelope, address: str, _options: list[str]
    ) -> str:
        """Take a recipient, or not."""
        if self.rcpt_reply.startswith("2"):
            envelope.rcpt_tos.append(address)
        return self.rcpt_reply

    async def handle_DATA(self, _server: SMTP, _session: Any, envelope: Envelope) -> str:  # noqa: N802
        """Take a message, or not."""
        await asyncio.sleep(self.data_delay_seconds)
        if self.data_reply.startswith("2"):
            content = envelope.content
            assert isinstance(content, bytes)
            message = message_from_bytes(content, policy=default)
            assert isinstance(message, EmailMessage)
            self.accepted.append(Accepted(list(envelope.rcpt_tos), message))
        return self.data_reply
