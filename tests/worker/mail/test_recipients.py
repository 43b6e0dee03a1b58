"""An e-mail to any address that the API accepts has that address as its only recipient."""

import idna
import msgspec
import pytest
from email_validator.rfc_constants import CASE_INSENSITIVE_MAILBOX_NAMES
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st

from service.api.bodies import CreateBody
from service.api.decoding import parse
from service.api.errors import InvalidSubmission
from tests.harness.examples import A_REQUEST
from tests.worker.mail.composing import address, compose, received
from worker.mail import message as mail_message

_WORDS = st.text("abz09!#$%&'*+-/=?^_`{|}~.", min_size=1, max_size=64)
# Encoded words of RFC 2047, and texts that nearly are.
_ENCODED_WORDS = st.builds(
    "{}=?{}?{}?{}{}{}".format,
    st.sampled_from(["", "", "a", "a."]),
    st.sampled_from(["utf-8", "us-ascii", "utf-8*en", "x", ""]),
    st.sampled_from("qbQBz"),
    st.text("ab=_0A.", max_size=12),
    st.sampled_from(["?=", "?=", "?", "=", ""]),
    st.sampled_from(["", "", "a", ".b", "=?utf-8?q?b?="]),
)
_LABELS = st.text("ab1-éß山", min_size=1, max_size=63)
_DOMAINS = (
    st.sampled_from(
        ["example.com", "EXAMPLE.Com", "bücher.example.com", "xn--bcher-kva.example", "1.2.3.com"]
    )
    | st.lists(_LABELS, min_size=2, max_size=6).map(".".join)
    | st.builds("{}.{}.com".format, st.text("x", min_size=63, max_size=63), st.text("y", max_size=63))
)
_ADDRESSES = st.emails() | st.builds("{}@{}".format, _WORDS | _ENCODED_WORDS, _DOMAINS)
_NAMES = st.text(min_size=1, max_size=255) | st.sampled_from(
    ["<eve@example.com>", "Ada, eve@example.com", '"', "=?utf-8?q?=0ABcc:_eve=40example.com?=", "あ" * 255]
)


@pytest.mark.parametrize("examples", [50, pytest.param(500, marks=pytest.mark.long)])
def test_accepted_address_is_the_only_recipient(examples):
    @given(_ADDRESSES, _ADDRESSES, _NAMES)
    @example("=?utf-8?q?a?=@example.com", "grace@firm.example.com", "Ada")
    @example("ada@customer.example.com", "=?utf-8?q?a?=@example.com", "Ada")
    @example("a" * 64 + "@" + ".".join("x" * 60 for _ in range(3)) + ".com", "grace@firm.example.com", "Ada")
    @example("!#$%&'*+-/=?^_`{|}~@example.com", "=?utf-8?q?a@example.com", "Ada")
    @example("a" * 65 + "@bücher.test", "grace@firm.example.com", "Ada")
    @example("ada@customer.example.com", "a.=?x?=@example.com", "Ada")
    @example("INFO@example.com", "Postmaster@example.com", "Ada")
    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    def is_the_only_recipient(customer, sender, name) -> None:
        names = {"customer_first_name": name, "sender_first_name": name}
        body = A_REQUEST | names | {"customer_email": customer, "sender_email": sender}
        try:
            new = parse(CreateBody, msgspec.json.encode(body)).validated(waiver_applies=False)
        except InvalidSubmission:
            reject()

        message = received(
            compose(**{field: new[field] for field in ("customer_email", "sender_email", *names)})
        )

        recipient = mail_message.in_ascii(new["customer_email"])
        assert recipient == in_ascii(customer)
        assert address(message, "To")[1] == recipient
        assert address(message, "Reply-To")[1] == in_ascii(sender)
        assert message.keys() == received(compose()).keys()
        assert not message["To"].defects + message["Reply-To"].defects

    is_the_only_recipient()


def in_ascii(address: str) -> str:
    """Return an address as a mail server without SMTPUTF8 accepts it, names of RFC 2142 in lower case."""
    local_part, _, domain = address.rpartition("@")
    if local_part.lower() in CASE_INSENSITIVE_MAILBOX_NAMES:
        local_part = local_part.lower()
    return f"{local_part}@{idna.encode(domain, uts46=True).decode()}"
