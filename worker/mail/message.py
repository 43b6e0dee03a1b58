"""Composes the e-mails for the customer: their headers and, for each kind, the text."""

import hashlib
import html
from datetime import datetime
from email.headerregistry import Address, BaseHeader, HeaderRegistry, MessageIDHeader
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import getaddresses
from functools import lru_cache
from typing import cast

import email_validator
import msgspec

from service.calculation_requests.email_addresses import ENCODED_WORD
from service.calculation_requests.model import CalculationRequest
from service.settings import InvalidSetting
from worker.mail import tokens
from worker.mail.ledger import Email
from worker.mail.link_detection import has_link

# In a header, spaces replace the characters of a name that would need quotes (RFC 5322, section 3.2.4). Some
# mail programs misread quotes. So `"Lovelace, A."` becomes `Lovelace A.`. A space after every dot keeps the
# parts of a name from looking like a domain.
_ADDRESS_SPECIALS = str.maketrans(
    dict.fromkeys('()<>[]:;@\\,"', " ") | dict.fromkeys(".\u2024\u3002\uff0e\uff61", ". ")
)
_LONGEST_NAME = 64  # Some mail programs show spaces inside a longer name that is encoded.
_LONGEST_LINE = 998  # RFC 5322, section 2.1.1


class _KeptHeaders(HeaderRegistry):
    """Makes each header class once, and parses recurring headers once. An e-mail takes 0.5 ms, not 1.4."""

    __getitem__ = lru_cache(maxsize=32)(HeaderRegistry.__getitem__)
    __call__ = lru_cache(maxsize=64)(HeaderRegistry.__call__)


_HEADERS = _KeptHeaders()
# A Message-ID is never folded, so that servers keep it as it is.
_HEADERS.map_to_type(tokens.HEADER.lower(), cast("type[BaseHeader]", MessageIDHeader))
_POLICY = SMTP.clone(header_factory=_HEADERS)


class Sender(msgspec.Struct, frozen=True):
    """The sender of every e-mail, from MAIL_FROM."""

    display_name: str
    address: str

    @classmethod
    def parse(cls, text: str) -> "Sender":
        """Read `address` or `Name <address>`. Raises InvalidSetting."""
        mailboxes = getaddresses([text])
        name, address = mailboxes[0] if len(mailboxes) == 1 else ("", "")
        try:
            return cls(name, in_ascii(address))
        except email_validator.EmailNotValidError:
            raise InvalidSetting("MAIL_FROM: expected `address` or `Name <address>`") from None


@lru_cache(maxsize=1024)  # A firm's addresses recur. A customer's address is used twice.
def in_ascii(address: str) -> str:
    """Return an address with its domain in ASCII (IDNA). Raises EmailNotValidError if it is invalid."""
    if ENCODED_WORD.search(address):
        raise email_validator.EmailNotValidError
    valid = email_validator.validate_email(
        address,
        check_deliverability=False,
        allow_smtputf8=False,
        test_environment=True,
        globally_deliverable=False,  # MAIL_FROM may be in a domain of a private network.
    )
    return valid.ascii_email or address


def compose(email: Email, request_url: str, sender: Sender, *, token: str, date: datetime) -> bytes:
    """Return the bytes of the e-mail. Equal arguments make equal bytes. Raises EmailNotValidError.

    Subject and first sentence name the registered conveyancer, so that no caller can write in another firm's
    name. The caller's own texts appear only elsewhere.
    """
    request = email.request
    customer = _without_link(f"{request.customer_first_name} {request.customer_last_name}")
    contact = _without_link(f"{request.sender_first_name} {request.sender_last_name}")
    firm = " ".join(email.firm.split())
    subject_for, text_of = _KINDS[email.id.kind]
    subject, text = subject_for.format(firm), text_of(request, customer, contact, firm, request_url)
    page = _as_html(text, subject, request_url)
    message = EmailMessage(policy=_POLICY)
    message["Message-ID"] = message[tokens.HEADER] = f"<{token}@{sender.address.rpartition('@')[2]}>"
    message["Date"] = date
    message["From"] = _mailbox(sender.display_name, sender.address)
    message["To"] = _mailbox(_in_header(customer), in_ascii(request.customer_email))
    message["Reply-To"] = _mailbox(_in_header(contact), in_ascii(request.sender_email))
    message["Subject"] = _literal(subject)
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(text, cte=_encoding(text))
    # The boundary cannot occur in the parts, because they would have to contain their own hash.
    message.make_alternative(hashlib.sha256(f"{text}{page}".encode()).hexdigest())
    message.add_alternative(page, subtype="html", cte=_encoding(page))
    return message.as_bytes()


def _mailbox(name: str, address: str) -> str:
    return str(Address(name, addr_spec=address))


def _encoding(text: str) -> str:
    """Return how a part is encoded. ASCII stays as it is, so that the source shows the link in one piece."""
    is_plain = text.isascii() and max(map(len, text.splitlines())) <= _LONGEST_LINE
    return "7bit" if is_plain else "quoted-printable"


def _without_link(text: str) -> str:
    """Return a text of the caller, or nothing if it has a link, which a customer would take for ours."""
    return "" if has_link(text) else text


def _in_header(name: str) -> str:
    """Return a name that cannot add an address, a link or a header, whatever the caller wrote."""
    plain = " ".join(_literal(name).translate(_ADDRESS_SPECIALS).split())[:_LONGEST_NAME].rstrip()
    return _without_link(plain)


def _literal(text: str) -> str:
    """Break up encoded words (RFC 2047), because mail programs would decode them, even into line breaks."""
    return text.replace("=?", "= ?")


def _as_html(text: str, title: str, link: str) -> str:
    """Return a text as a page, in which the link may be broken at the edge of a narrow screen."""
    url, paragraphs = html.escape(link), html.escape(text.rstrip()).replace("\n\n", "</p>\n<p>")
    anchor = f'<a href="{url}" style="word-break: break-all">\n{url}\n</a>'
    return f"""\
<!doctype html>
<html lang="en">
<head><title>{html.escape(title)}</title></head>
<body style="font-family: sans-serif; line-height: 1.5">
<p>{paragraphs.replace(url, anchor)}</p>
</body>
</html>
"""


def _invitation(request: CalculationRequest, customer: str, contact: str, firm: str, request_url: str) -> str:
    sent_by = ", ".join(filter(None, (contact, _without_link(request.sender_organization_name))))
    lines = {"Sent by": sent_by, "Reference": _without_link(request.case_ref)}
    details = "".join(f"\n{name}: {value}\n" for name, value in lines.items() if value)
    return f"""\
{f"Dear {customer}," if customer else "Hello,"}

{firm} has asked us to work out the Stamp Duty
Land Tax on your property purchase.
{details}
Please answer a few questions about the purchase here:

{request_url}

This link is yours alone: anyone who has it can see your answers, so please do
not forward it. If you have any questions, reply to this e-mail and
{contact or firm} will get your message.
"""


# What each kind of e-mail is: its subject and its text. It has the link if its text does.
_KINDS = {"invitation": ("Your Stamp Duty Land Tax calculation for {}", _invitation)}
