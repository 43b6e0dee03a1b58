"""Postfix's reports of e-mails that it cannot deliver are those that are kept in the harness."""

from email import message_from_bytes, policy
from email.message import EmailMessage, Message
from typing import Any

import pytest

from tests.harness import bounces, postfix
from tests.harness.postfix import MISSING_DOMAIN, MailSystem
from tests.harness.waiting import eventually

pytestmark = pytest.mark.long

_ADA = "ada@customer.example.com"
_GREYLISTED = b"451 4.7.1 Greylisted, try again in five minutes"
# Fields and headers that differ each time. Message-Id is that of a report.
_OF_ONE_RUN = {"Arrival-Date", "Content-Type", "Date", "Message-Id", "Received", "Will-Retry-Until"}
_OF_ONE_RUN |= {"X-Postfix-Queue-ID"}


def _parsed(message: bytes) -> EmailMessage:
    parsed = message_from_bytes(message, policy=policy.default)
    assert isinstance(parsed, EmailMessage)
    return parsed


def shape(message: bytes) -> list[Any]:
    """Return the type of each part, with its fields or headers that are the same in each run."""
    return [(part.get_content_type(), _fields(part)) for part in _parsed(message).walk()]


def _fields(part: Message) -> dict[str, str]:
    if part.get_content_type() == "text/rfc822-headers":
        part = _parsed(str(part.get_payload()).encode())
    return {name: value for name, value in part.items() if name not in _OF_ONE_RUN}


async def report(system: MailSystem, *, recipient: str = _ADA, message: bytes | None = None) -> bytes:
    """Send our e-mail, and return the message that arrives then."""
    original = message or bounces.message("original")
    await system.send(original, sender=system.mail_from, recipient=recipient)
    (arrived,) = await eventually(lambda: system.mailbox.messages)
    return arrived.content


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("postfix_unknown_user", f"550 5.1.1 <{_ADA}>: Recipient address rejected: User unknown".encode()),
        ("postfix_full_mailbox", b"552 5.2.2 The mailbox is full"),
    ],
)
async def test_refused_recipient_is_reported_as_kept(mail_system, name, reply):
    mail_system.customers.refusals[_ADA] = reply

    reported = await report(mail_system)

    assert shape(reported) == shape(bounces.message(name))


async def test_refused_content_is_reported_as_kept(mail_system):
    mail_system.customers.content_refusals[_ADA] = b"550 5.7.1 Message rejected as spam"

    reported = await report(mail_system)

    assert shape(reported) == shape(bounces.message("postfix_refused_content"))


async def test_missing_domain_is_reported_as_kept(mail_system):
    reported = await report(mail_system, recipient=f"ada@{MISSING_DOMAIN}")

    assert shape(reported) == shape(bounces.message("postfix_missing_domain"))


async def test_delay_is_reported_as_kept_and_delivery_is_not(mail_system):
    mail_system.customers.refusals[_ADA] = _GREYLISTED

    reported = await report(mail_system)
    mail_system.customers.refusals.clear()
    mail_system.relay.flush()
    await eventually(lambda: mail_system.customers.contents)
    await eventually(lambda: "status=sent (250 OK accepted)" in mail_system.relay.log)

    assert shape(reported) == shape(bounces.message("postfix_delay"))
    assert len(mail_system.mailbox.messages) == 1


async def test_end_of_the_tries_is_reported_as_kept(authority):
    settings = {"maximal_queue_lifetime": "1s", "delay_warning_time": "0"}
    async with postfix.mail_system(authority, **settings) as system:
        system.customers.refusals[_ADA] = _GREYLISTED

        reported = await report(system)

    assert shape(reported) == shape(bounces.message("postfix_expired"))


async def test_report_of_a_large_email_returns_its_headers_alone(mail_system):
    mail_system.customers.content_refusals[_ADA] = b"550 5.7.1 Message rejected as spam"
    original = bounces.message("original").replace(b"Dear", 10_000 * b"Dear\r\n")

    reported = await report(mail_system, message=original)

    assert shape(reported) == shape(bounces.message("postfix_headers_alone"))
