"""The e-mail with the link of a request for its customer: its headers and its text."""

import html
from datetime import datetime
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP as SMTP_POLICY
from email.utils import format_datetime, getaddresses

import email_validator
import msgspec

from service.calculation_requests.model import CalculationRequest
from service.settings import InvalidSetting
from worker.mail.links import has_link

_LONGEST_LINE = 998  # RFC 5322, section 2.1.1

# Characters that a name in a header loses: `"Lovelace, A."` becomes `Lovelace A.`. Python's email drops the
# quotes of a name when it folds the header, so a name must not need any (RFC 5322, section 3.2.3). Folding
# also inserts a space before the next encoded word, which could turn the beginning of a name into a domain.
# With a space after every dot there is no domain to begin with.
_ADDRESS_SPECIALS = str.maketrans(
    dict.fromkeys('()<>[]:;@\\,"', " ") | dict.fromkeys(".\u2024\u3002\uff0e\uff61", ". ")
)
_LONGEST_NAME = 64


class EmailNotComposable(Exception):
    """No e-mail can be composed from the addresses and names of a request."""


class Sender(msgspec.Struct, frozen=True):
    """The sender of every e-mail, as MAIL_FROM gives it."""

    display_name: str
    address: str

    @classmethod
    def parse(cls, text: str) -> "Sender":
        """Read `address` or `Name <address>`. Raises InvalidSetting."""
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
        """The right-hand side of the Message-IDs."""
        return self.address.rpartition("@")[2]


def recipient_of(request: CalculationRequest) -> str:
    """Return the customer's address for the SMTP envelope."""
    return _in_ascii(request.customer_email)


def _in_ascii(address: str) -> str:
    """Return an address with its domain in ASCII (IDNA)."""
    valid = email_validator.validate_email(
        address, check_deliverability=False, allow_smtputf8=False, test_environment=True
    )
    return valid.ascii_email or address


def compose(
    request: CalculationRequest, *, firm: str, request_url: str, event_id: str, date: datetime, sender: Sender
) -> EmailMessage:
    """Return the e-mail that contains the customer's link. The same rows always make the same e-mail.

    Subject and first sentence name *firm*, the registered conveyancer: a caller must not be able to write in
    the name of another firm. The caller's own words appear beside it.
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
    """Return the request with words and addresses from which an e-mail can certainly be composed.

    If composing fails all the same, the request is not at fault.
    """
    names = dict.fromkeys(("customer_first_name", "customer_last_name", "sender_first_name"), "A")
    more = dict.fromkeys(("sender_last_name", "sender_organization_name", "case_ref"), "A")
    addresses = dict.fromkeys(("customer_email", "sender_email"), "a@example.com")
    return msgspec.structs.replace(request, **names, **more, **addresses)


class _Words(msgspec.Struct, frozen=True):
    """The caller's texts. One with a link is left out: customers would trust it as part of our e-mail."""

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
        """The caller's names and case reference, a line each."""
        sent_by = ", ".join(filter(None, (self.sender, self.organisation)))
        lines = {"Sent by": sent_by, "Reference": self.reference}
        return [f"{name}: {value}" for name, value in lines.items() if value]


def _mailbox(name: str, address: str) -> Address:
    """Return a mailbox whose name cannot add an address, a link or a header, whatever the caller wrote."""
    plain = " ".join(_literal(name).translate(_ADDRESS_SPECIALS).split())[:_LONGEST_NAME].rstrip()
    return Address("" if has_link(plain) else plain, addr_spec=address)


def _literal(text: str) -> str:
    """Keep Python's email from decoding an encoded word (RFC 2047) in a text: it may hide a line break."""
    return text.replace("=?", "= ?")


def _transfer_encoding(content: str) -> str:
    """Send ASCII unencoded, so that the link is not broken in the source of the e-mail either."""
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
