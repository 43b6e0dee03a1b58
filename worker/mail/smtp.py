"""SMTP, and the mail we send."""

import asyncio
import html
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP as SMTP_POLICY
from email.utils import format_datetime, getaddresses
from urllib.parse import unquote, urlsplit

import aiosmtplib
import email_validator
import msgspec
from aiosmtplib import SMTPDataError, SMTPException, SMTPRecipientRefused

from service.calculation_requests.model import CalculationRequest
from service.settings import InvalidSetting
from service.telemetry import tracing
from worker.mail.links import has_link
from worker.settings import WorkerSettings

_DEFAULT_PORTS = {"smtp": 25, "smtp+starttls": 587, "smtps": 465}
_SERVICE_NOT_AVAILABLE = 421
NO_REPLY = 0  # in place of a reply code
_LONGEST_REPLY = 1000
_LONGEST_LINE = 998  # RFC 5322, section 2.1.1

# Python drops the quotes of a name when it folds the header, so none may need them (RFC 5322, section 3.2.3).
# It also puts a space where it begins another encoded word, which may end a domain there: so does every dot.
_ADDRESS_SPECIALS = str.maketrans(
    dict.fromkeys('()<>[]:;@\\,"', " ") | dict.fromkeys(".\u2024\u3002\uff0e\uff61", ". ")
)
_LONGEST_NAME = 64


class MailServerUnavailable(Exception):
    """The mail server cannot be reached, or does not serve us: no fault of the e-mail."""


class EmailRefused(Exception):
    """The mail server refused this e-mail, for now (4xx, NO_REPLY) or for good (5xx)."""

    def __init__(self, code: int, reply: str) -> None:
        super().__init__(code)
        self.code = code
        self.reply = reply

    @property
    def is_final(self) -> bool:
        """Whether another attempt can change nothing (RFC 5321, section 4.2.1)."""
        return self.code >= 500


class EmailNotComposable(Exception):
    """The addresses and names of a request make no e-mail."""


class _BrokenOff(Exception):
    """The mail server broke off before it had the content."""

    def __init__(self, verdict: EmailRefused | MailServerUnavailable) -> None:
        super().__init__()
        self.verdict = verdict  # if it breaks off again


class Sender(msgspec.Struct, frozen=True):
    """Who our mail is from: `address` or `Name <address>`."""

    display_name: str
    address: str

    @classmethod
    def parse(cls, text: str) -> "Sender":
        """Read MAIL_FROM. Raises InvalidSetting."""
        mailboxes = getaddresses([text])
        name, address = mailboxes[0] if len(mailboxes) == 1 else ("", "")
        try:
            valid = email_validator.validate_email(
                address,
                check_deliverability=False,
                allow_smtputf8=False,
                test_environment=True,
                globally_deliverable=False,
            )
        except email_validator.EmailNotValidError:
            raise InvalidSetting("MAIL_FROM: expected `address` or `Name <address>`") from None
        return cls(name, valid.ascii_email or valid.normalized)

    @property
    def domain(self) -> str:
        """The right-hand side of our Message-IDs."""
        return self.address.rpartition("@")[2]


class Envelope(msgspec.Struct, frozen=True):
    """The addresses that the mail server goes by."""

    sender: str
    recipient: str


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
        self._answer_seconds = settings.smtp_answer_seconds
        self._idle: list[aiosmtplib.SMTP] = []

    def describe(self) -> tracing.Attributes:
        """Return what a trace says of the mail server."""
        return {
            "network.protocol.name": "smtp",
            "server.address": self._host,
            "server.port": self._port,
        }

    async def send(self, envelope: Envelope, content: bytes, *, before_content: Callable[[], None]) -> str:
        """Return the mail server's reply on acceptance. Raises EmailRefused or MailServerUnavailable.

        *before_content* is called when only the content is left to be sent. It may raise to keep that back.

        A server that breaks off may be going down, or have had enough of a connection. So it is asked once
        more, on a new one. If it opens that, and breaks off at this recipient again, the e-mail is at fault.
        """
        connection = await self._reuse() or await self._open()
        try:
            return await self._send_over(connection, envelope, content, before_content)
        except _BrokenOff:
            connection = await self._open()
        try:
            return await self._send_over(connection, envelope, content, before_content)
        except _BrokenOff as error:
            raise error.verdict from error.__cause__

    async def _send_over(
        self,
        connection: aiosmtplib.SMTP,
        envelope: Envelope,
        content: bytes,
        before_content: Callable[[], None],
    ) -> str:
        """Send over a connection, and keep it unless more went wrong on it than the fate of this e-mail."""
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
        """Say who it is from, the same for every e-mail, and who it is for."""
        try:
            await connection.mail(envelope.sender)
        except (SMTPException, OSError) as error:
            raise _BrokenOff(MailServerUnavailable()) from error
        try:
            await connection.rcpt(envelope.recipient)
        except (SMTPException, OSError) as error:
            refusal = _refusal(error, without_reply="the mail server broke off at the recipient")
            if isinstance(error, SMTPRecipientRefused) and error.code != _SERVICE_NOT_AVAILABLE:
                raise refusal from None
            raise _BrokenOff(refusal) from error

    async def _send_content(self, connection: aiosmtplib.SMTP, content: bytes) -> str:
        """Send DATA. Without a reply nobody knows whether it was accepted: that counts as an attempt."""
        try:
            response = await connection.data(content, timeout=self._answer_seconds)
        except (SMTPException, OSError) as error:
            if not isinstance(error, SMTPDataError):
                connection.close()
            without_reply = "no reply to the content; it may have been accepted"
            raise _refusal(error, without_reply=without_reply) from None
        return response.message

    async def close(self) -> None:
        """Say goodbye on every idle connection."""
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

    async def connect(self) -> aiosmtplib.SMTP:
        """Return a new connection, encrypted and logged in as SMTP_URL says. Raises as aiosmtplib does."""
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


def _refusal(error: Exception, *, without_reply: str) -> EmailRefused:
    if isinstance(error, SMTPRecipientRefused | SMTPDataError):
        return EmailRefused(error.code, _storable(f"{error.code} {error.message}"))
    return EmailRefused(NO_REPLY, without_reply)


def _storable(reply: str) -> str:
    """Return what a mail server said as text that Postgres takes: it may be of any encoding, with NULs."""
    text = reply.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")[:_LONGEST_REPLY]


def recipient_of(request: CalculationRequest) -> str:
    """Return the customer's address as the envelope takes it."""
    return _in_ascii(request.customer_email)


def _in_ascii(address: str) -> str:
    """Return an address with an international domain in ASCII."""
    valid = email_validator.validate_email(
        address, check_deliverability=False, allow_smtputf8=False, test_environment=True
    )
    return valid.ascii_email or address


def compose(
    request: CalculationRequest, *, firm: str, request_url: str, event_id: str, date: datetime, sender: Sender
) -> EmailMessage:
    """Return the e-mail that brings the customer the link. Made again from the same rows it is the same.

    It comes from *firm*, the registered conveyancer. The caller's own words stand beside that name.
    """
    words = _Words.of(request)
    firm = " ".join(firm.split())
    message = EmailMessage(policy=SMTP_POLICY)
    message["Message-ID"] = f"<{event_id}@{sender.domain}>"
    message["Date"] = format_datetime(date)
    message["From"] = _mailbox(sender.display_name, sender.address)
    message["To"] = _mailbox(words.customer, recipient_of(request))
    message["Reply-To"] = _mailbox(words.sender, _in_ascii(request.sender_email))
    message["Subject"] = _literal(f"Your Stamp Duty Land Tax calculation for {firm}")
    message["Auto-Submitted"] = "auto-generated"
    text = _text(words, firm, request_url)
    page = _html(words, firm, request_url)
    message.set_content(text, cte=_transfer_encoding(text))
    message.add_alternative(page, subtype="html", cte=_transfer_encoding(page))
    return message


def with_plain_words(request: CalculationRequest) -> CalculationRequest:
    """Return a request of which an e-mail can be made, if of any."""
    names = dict.fromkeys(("customer_first_name", "customer_last_name", "sender_first_name"), "A")
    more = dict.fromkeys(("sender_last_name", "sender_organization_name", "case_ref"), "A")
    addresses = dict.fromkeys(("customer_email", "sender_email"), "a@example.com")
    return msgspec.structs.replace(request, **names, **more, **addresses)


class _Words(msgspec.Struct, frozen=True):
    """What the caller wrote. A text with a link is left out: it would stand in our mail, under our name."""

    customer: str
    sender: str
    organisation: str
    reference: str

    @classmethod
    def of(cls, request: CalculationRequest) -> "_Words":
        texts = (
            f"{request.customer_first_name} {request.customer_last_name}",
            f"{request.sender_first_name} {request.sender_last_name}",
            request.sender_organization_name,
            request.case_ref,
        )
        return cls(*("" if has_link(text) else text for text in texts))

    @property
    def greeting(self) -> str:
        """The first line."""
        return f"Dear {self.customer}," if self.customer else "Hello,"

    @property
    def details(self) -> list[str]:
        """What the firm says of itself and of the purchase, a line each."""
        sent_by = ", ".join(filter(None, (self.sender, self.organisation)))
        lines = {"Sent by": sent_by, "Reference": self.reference}
        return [f"{name}: {value}" for name, value in lines.items() if value]


def _mailbox(name: str, address: str) -> Address:
    """Return a mailbox whose name, whatever it is, brings no address, no link and no header of its own."""
    plain = " ".join(_literal(name).translate(_ADDRESS_SPECIALS).split())[:_LONGEST_NAME].rstrip()
    return Address("" if has_link(plain) else plain, addr_spec=address)


def _literal(text: str) -> str:
    """Keep Python from decoding what looks like an encoded word (RFC 2047): it may hide a line break."""
    return text.replace("=?", "= ?")


def _transfer_encoding(content: str) -> str:
    """Keep plain ASCII as it is, so that the link is whole where a person or a script looks for it."""
    is_plain = content.isascii() and max(map(len, content.splitlines())) <= _LONGEST_LINE
    return "7bit" if is_plain else "quoted-printable"


def _text(words: _Words, firm: str, request_url: str) -> str:
    details = "".join(f"{line}\n" for line in words.details)
    return f"""\
{words.greeting}

{firm} has asked us to work out the Stamp Duty
Land Tax on your property purchase.
{details}
Please answer a few questions about the purchase here:

{request_url}

This link is yours alone: anyone who has it can see your answers, so please do
not forward it. If you have any questions, reply to this e-mail and
{words.sender or firm} will get your message.
"""


def _html(words: _Words, firm: str, request_url: str) -> str:
    details = "".join(f"<br>\n{html.escape(line)}" for line in words.details)
    url = html.escape(request_url)
    return f"""\
<!doctype html>
<html lang="en">
<body style="font-family: sans-serif; line-height: 1.5">
<p>{html.escape(words.greeting)}</p>
<p>{html.escape(firm)} has asked us to work out the Stamp Duty Land Tax on your property
purchase.{details}</p>
<p>Please answer a few questions about the purchase here:</p>
<p><a href="{url}">
{url}
</a></p>
<p>This link is yours alone: anyone who has it can see your answers, so please do not forward it. If you have
any questions, reply to this e-mail and {html.escape(words.sender or firm)} will get your
message.</p>
</body>
</html>
"""
