"""Composes e-mails, and reads them as a recipient's mail program does."""

from datetime import UTC, datetime
from email import message_from_bytes
from email.headerregistry import AddressHeader
from email.message import EmailMessage
from email.policy import default
from typing import Any

import msgspec

from service.calculation_requests.email_changes import EmailId, Kind
from tests.harness import stored
from worker.mail import message as mail_message
from worker.mail.ledger import Email
from worker.mail.message import Sender

SENDER = Sender("Calculations", "calculations@service.example.com")

WORDS = (
    "customer_first_name",
    "customer_last_name",
    "sender_first_name",
    "sender_last_name",
    "sender_organization_name",
    "case_ref",
)

URL = "https://app.example.com/calculator/request/req_1?secret=" + "s" * 43

TOKEN = "req_0355XiLow7ooZF7j847Kec.invitation.1.ql4anVoj0DNzSlRw4RUsyg"

DATE = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)

A_STORED_REQUEST = msgspec.structs.replace(stored.new_request(), created_at=DATE, updated_at=DATE)


def compose(firm: str = "Acme", *, kind: Kind = "invitation", **fields: Any) -> bytes:
    request = msgspec.structs.replace(A_STORED_REQUEST, **fields)
    email = Email(EmailId(request.id, 1, kind), request, firm, 0, None, 0.0, 0.0)
    return mail_message.compose(email, URL, SENDER, token=TOKEN, date=DATE)


def compose_all_of(text: str, *, kind: Kind = "invitation") -> bytes:
    fields: dict[str, Any] = dict.fromkeys(WORDS, text)
    return compose(kind=kind, **fields)


def received(source: bytes) -> EmailMessage:
    read = message_from_bytes(source, policy=default)
    assert isinstance(read, EmailMessage)
    return read


def body(message: EmailMessage, kind: str) -> str:
    part = message.get_body((kind,))
    assert part is not None
    content: str = part.get_content()
    return content.replace("\r\n", "\n")


def address(message: EmailMessage, header: str) -> tuple[str, str]:
    """Return the name and the address of the one mailbox in a header."""
    value = message[header]
    assert isinstance(value, AddressHeader)
    (mailbox,) = value.addresses
    return mailbox.display_name, mailbox.addr_spec
