"""SMTP, and the mail we send."""

import asyncio
import html
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP as SMTP_POLICY
from email.utils import format_datetime, parseaddr
from urllib.parse import unquote, urlsplit

import aiosmtplib
import email_validator
import msgspec
from aiosmtplib import SMTPException, SMTPRecipientsRefused, SMTPResponseException

from service.calculation_requests import CalculationRequest
from service.settings import InvalidSetting
from worker.settings import WorkerSettings

_DEFAULT_PORTS = {"smtp": 25, "smtp+starttls": 587, "smtps": 465}
_SERVICE_NOT_AVAILABLE = 421


class MailServerUnavailable(Exception):
    """The mail server cannot be reached, or does not serve us: no fault of the e-mail."""


class EmailRefused(Exception):
    """The mail server refused this e-mail, for now (4xx) or for good (5xx)."""

    def __init__(self, code: int, reply: str) -> None:
        super().__init__(code)
        self.code = code
        self.reply = reply

    @property
    def is_final(self) -> bool:
        """Whether another attempt can change nothing (RFC 5321, section 4.2.1)."""
        return self.code >= 500


class Sender(msgspec.Struct, frozen=True):
    """Who our mail is from: `address` or `Name <address>`."""

    display_name: str
    address: str

    @classmethod
    def parse(cls, text: str) -> "Sender":
        """Read MAIL_FROM. Raises InvalidSetting."""
        name, address = parseaddr(text)
        try:
            valid = email_validator.validate_email(
                address, check_deliverability=False, test_environment=True, globally_deliverable=False
            )
        except email_validator.EmailNotValidError:
            raise InvalidSetting("MAIL_FROM: expected `address` or `Name <address>`") from None
        return cls(name, valid.ascii_email or valid.normalized)

    @property
    def domain(self) -> str:
        """The right-hand side of our Message-IDs."""
        return self.address.rpartition("@")[2]


class Mailer:
    """Sends mail over a few connections, each used by one e-mail at a time and kept for the next."""

    def __init__(self, settings: WorkerSettings) -> None:
        url = urlsplit(settings.smtp_url)
        self._host = url.hostname or "localhost"
        self._port = url.port or _DEFAULT_PORTS[url.scheme]
        self._scheme = url.scheme
        self._username = unquote(url.username) if url.username else None
        self._password = unquote(url.password) if url.password else None
        self._timeout_seconds = settings.smtp_timeout_seconds
        self._idle: list[aiosmtplib.SMTP] = []

    async def send(self, message: EmailMessage, *, sender: str, recipient: str) -> str:
        """Return the mail server's reply on acceptance. Raises EmailRefused or MailServerUnavailable."""
        async with self._connection() as connection:
            try:
                _, reply = await connection.sendmail(sender, [recipient], message.as_bytes())
            except SMTPRecipientsRefused as error:
                raise _refusal(error.recipients[0]) from None
            except aiosmtplib.SMTPDataError as error:
                raise _refusal(error) from None
        return reply

    async def close(self) -> None:
        """Say goodbye on every idle connection."""
        while self._idle:
            with suppress(SMTPException, OSError):
                await self._idle.pop().quit(timeout=1.0)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[aiosmtplib.SMTP]:
        """Lend a connection; it is kept unless something but the fate of an e-mail went wrong on it."""
        try:
            connection = await self._reuse() or await self._connect()
        except (SMTPException, OSError, ValueError) as error:
            raise MailServerUnavailable from error
        kept = False
        try:
            yield connection
            kept = True
        except EmailRefused:
            kept = True
            raise
        except (SMTPException, OSError) as error:
            raise MailServerUnavailable from error
        finally:
            if kept and connection.is_connected:
                self._idle.append(connection)
            else:
                connection.close()

    async def _reuse(self) -> aiosmtplib.SMTP | None:
        """Return an idle connection that still answers."""
        while self._idle:
            connection = self._idle.pop()
            try:
                await connection.rset(timeout=5.0)
            except (SMTPException, OSError):
                connection.close()
            else:
                return connection
        return None

    async def _connect(self) -> aiosmtplib.SMTP:
        connection = aiosmtplib.SMTP(
            hostname=self._host,
            port=self._port,
            username=self._username,
            password=self._password,
            use_tls=self._scheme == "smtps",
            start_tls=self._scheme == "smtp+starttls",  # never None: that can be stripped on the way
            timeout=self._timeout_seconds,
            local_hostname=socket.gethostname(),
        )
        async with asyncio.timeout(self._timeout_seconds):
            await connection.connect()
        return connection


def _refusal(error: SMTPResponseException) -> Exception:
    if error.code == _SERVICE_NOT_AVAILABLE:
        return MailServerUnavailable(error.code)
    return EmailRefused(error.code, f"{error.code} {error.message}")


def recipient_of(request: CalculationRequest) -> str:
    """Return the customer's address as the envelope takes it, with an international domain in ASCII."""
    valid = email_validator.validate_email(
        request.customer_email, check_deliverability=False, test_environment=True
    )
    return valid.ascii_email or request.customer_email


def compose(
    request: CalculationRequest, *, request_url: str, event_id: str, date: datetime, sender: Sender
) -> EmailMessage:
    """Return the e-mail that brings the customer the link. Made again from the same event it is the same."""
    message = EmailMessage(policy=SMTP_POLICY)
    message["Message-ID"] = f"<{event_id}@{sender.domain}>"
    message["Date"] = format_datetime(date)
    message["From"] = Address(sender.display_name, addr_spec=sender.address)
    message["To"] = Address(
        f"{request.customer_first_name} {request.customer_last_name}", addr_spec=recipient_of(request)
    )
    message["Reply-To"] = Address(
        f"{request.sender_first_name} {request.sender_last_name}", addr_spec=request.sender_email
    )
    message["Subject"] = f"Your Stamp Duty Land Tax calculation for {request.sender_organization_name}"
    message["Auto-Submitted"] = "auto-generated"
    text = _text(request, request_url)
    page = _html(request, request_url)
    message.set_content(text, cte=_transfer_encoding(text))
    message.add_alternative(page, subtype="html", cte=_transfer_encoding(page))
    return message


def _transfer_encoding(content: str) -> str:
    """Keep plain ASCII as it is, so that the link is whole where a person or a script looks for it."""
    return "7bit" if content.isascii() else "quoted-printable"


def _text(request: CalculationRequest, request_url: str) -> str:
    return f"""\
Dear {request.customer_first_name} {request.customer_last_name},

{request.sender_organization_name} has asked us to work out the Stamp Duty
Land Tax on your property purchase (reference: {request.case_ref}).

Please answer a few questions about the purchase here:

{request_url}

This link is yours alone: whoever has it can see your answers, so please do
not forward it. If you have any questions, reply to this e-mail and
{request.sender_first_name} {request.sender_last_name} will get your message.
"""


def _html(request: CalculationRequest, request_url: str) -> str:
    safe = {
        name: html.escape(getattr(request, name))
        for name in (
            "customer_first_name",
            "customer_last_name",
            "sender_organization_name",
            "sender_first_name",
            "sender_last_name",
            "case_ref",
        )
    }
    url = html.escape(request_url)
    return f"""\
<!doctype html>
<html lang="en">
<body style="font-family: sans-serif; line-height: 1.5">
<p>Dear {safe["customer_first_name"]} {safe["customer_last_name"]},</p>
<p>{safe["sender_organization_name"]} has asked us to work out the Stamp Duty Land Tax on your property
purchase (reference: {safe["case_ref"]}).</p>
<p>Please answer a few questions about the purchase here:</p>
<p><a href="{url}">
{url}
</a></p>
<p>This link is yours alone: whoever has it can see your answers, so please do not forward it. If you have
any questions, reply to this e-mail and {safe["sender_first_name"]} {safe["sender_last_name"]} will get your
message.</p>
</body>
</html>
"""
