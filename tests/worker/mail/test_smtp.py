"""The mail itself, and what the mail server does with it."""

import asyncio
import html
import itertools
import re
import unicodedata
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from email import message_from_bytes
from email.headerregistry import AddressHeader
from email.message import EmailMessage
from email.policy import default
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from linkify_it import LinkifyIt
from linkify_it.tlds import TLDS

from service.calculation_requests.model import CalculationRequest
from service.identifiers import new_request_id
from tests.harness.certificates import Authority
from tests.harness.examples import A_REQUEST, SECRET_KEYS
from tests.harness.mail_server import Login, MailServer, ScriptedMailServer
from worker.mail import message as mail_message
from worker.mail.message import Sender
from worker.mail.smtp import EmailRefused, Envelope, Mailer, MailServerUnavailable
from worker.settings import WorkerSettings

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
DATE = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)

A_STORED_REQUEST = msgspec.convert(
    {
        **A_REQUEST,
        "id": new_request_id(),
        "conveyancer_id": "acme",
        "created_at": DATE,
        "updated_at": DATE,
        "customer_phone": None,
        "request_type": "SDLT_CALCULATION",
        "property_value": None,
        "notes": None,
        "external_id": None,
        "meta_data": None,
        "calculation_fee_exempt": False,
        "calculation_fee_exempt_reason": None,
        "calculation_id": None,
        "secret_salt": b"",
        "secret_key_id": "current",
        "sequence": 1,
    },
    CalculationRequest,
)


def compose(firm: str = "Acme", **fields: Any) -> EmailMessage:
    """Return the e-mail of a request with these fields, from a conveyancer of this name."""
    request = msgspec.structs.replace(A_STORED_REQUEST, **fields)
    return mail_message.compose(
        request, firm=firm, request_url=URL, event_id="event-1", date=DATE, sender=SENDER
    )


def compose_all_of(text: str) -> EmailMessage:
    """Return the e-mail of a request all of whose words are *text*."""
    return compose(**dict.fromkeys(WORDS, text))


def received(message: EmailMessage) -> EmailMessage:
    """Return an e-mail as its reader's program sees it, after it has gone over the wire."""
    read = message_from_bytes(message.as_bytes(), policy=default)
    assert isinstance(read, EmailMessage)
    return read


def body(message: EmailMessage, kind: str) -> str:
    """Return the text or the HTML of an e-mail."""
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


# The message


def test_email_has_a_text_and_an_html_part() -> None:
    message = received(compose())

    assert message.get_content_type() == "multipart/alternative"
    assert [part.get_content_type() for part in message.iter_parts()] == ["text/plain", "text/html"]


def test_email_has_the_headers_of_an_automatic_message() -> None:
    message = received(compose())

    assert message["Message-ID"] == "<event-1@service.example.com>"
    assert message["Date"].datetime == DATE
    assert message["Auto-Submitted"] == "auto-generated"


@pytest.mark.parametrize("first_name", ["Ada", "Zoë", "王"], ids=["ASCII", "Latin", "Chinese"])
def test_link_stands_on_a_line_of_its_own(first_name: str) -> None:
    message = received(compose(customer_first_name=first_name))

    assert body(message, "plain").splitlines().count(URL) == 1
    assert body(message, "html").splitlines().count(URL) == 1


def test_link_is_whole_on_the_wire_when_the_text_is_ascii() -> None:
    assert f"\r\n{URL}\r\n".encode() in compose().as_bytes()


@pytest.mark.parametrize(
    ("first_name", "last_name"),
    [
        ("Ada", "Lovelace"),
        ("Ada", "Lovelace, Countess"),
        ('Ada "the first"', "Lovelace"),
        ("Ada", "Lovelace <ada@elsewhere>"),
        ("Ada\\", "Lovelace"),
        ("Zoë", "Ångström"),
        ("Zoë", 'O\'Brien, "Zo"'),
        ("王", "小明"),
        ("👩‍💻", "😀"),
        ("Ada;", "Lovelace:"),
        ("(Ada)", "[Lovelace]"),
        ("é" * 255, "ü, " * 80),
        ("x" * 255, "y" * 255),
        ("x y " * 63, "z, " * 80),
        ("Ada", "Lovelace <evil@elsewhere>, Countess of somewhere far away and of many other places"),
        ("Dr. J. R. R.", "T. " * 80),
    ],
)
def test_name_of_any_shape_stays_one_mailbox(first_name: str, last_name: str) -> None:
    message = received(
        compose(
            customer_first_name=first_name,
            customer_last_name=last_name,
            sender_first_name=first_name,
            sender_last_name=last_name,
        )
    )

    name = f"{first_name} {last_name}"
    for header, expected in (("To", "ada@customer.example.com"), ("Reply-To", "grace@firm.example.com")):
        shown, addressed = address(message, header)
        assert addressed == expected
        assert shown
        assert letters(name).startswith(letters(shown))
    assert f"Dear {name}," in body(message, "plain")


def letters(text: str) -> str:
    """Return the letters and digits of *text*: what a header may not lose, but for the end of a long name."""
    return "".join(character for character in text if character.isalnum())


def squeezed(text: str) -> str:
    """Return *text* without its spaces, which a folded header may gather."""
    return "".join(text.split())


@pytest.mark.parametrize(
    "firm",
    [
        "Hopper & Partners",
        "Müller, Söhne & Co",
        "conveyancing.example.com",
        "x" * 255,
        "ö" * 255,
        "<b>Bold</b>",
        "A\nB\u2028C\x85D\x0bE",
    ],
)
def test_subject_and_first_sentence_name_the_registered_conveyancer(firm: str) -> None:
    message = received(compose(firm))

    name = " ".join(firm.split())
    assert squeezed(message["Subject"]) == squeezed(f"Your Stamp Duty Land Tax calculation for {name}")
    for kind in ("plain", "html"):
        assert html.unescape(body(message, kind)).count(f"{name} has asked us to work out") == 1


def test_organisation_and_reference_stand_beside_the_registered_name() -> None:
    message = received(compose(sender_organization_name="Barclays Fraud Team"))

    assert "Barclays" not in message["Subject"]
    for kind in ("plain", "html"):
        lines = html.unescape(body(message, kind)).splitlines()
        assert sum(line.startswith("Sent by: Grace Hopper, Barclays Fraud Team") for line in lines) == 1
        assert sum(line.startswith("Reference: 12 High Street") for line in lines) == 1


# What mail programs make links of, and what they leave alone

LINKS = [
    "https://evil.example/pay",
    "HTTP://EVIL",
    "hxxp://evil",
    "evil.com",
    "Pay at evil.com!",
    "evil.law",
    "evil.tldofnextyear",
    "www.evil",
    "x.co",
    "(x.co)",
    "/x.co",
    "_x.co_",
    ".x.co",
    "ada@elsewhere.example",
    "Lovelace <ada@elsewhere.example>",
    "mailto:ada@elsewhere",
    "192.0.2.1",
    "\\\\evil\\share",
    "bücher.de",
    "пример.рф",
    "例.中国",
    "x\N{IDEOGRAPHIC FULL STOP}com",
    "x\N{FULLWIDTH FULL STOP}com",
    "x\N{HALFWIDTH IDEOGRAPHIC FULL STOP}com",
    "x\N{ONE DOT LEADER}com",
    "x.co\N{ZERO WIDTH SPACE}uk",
    "x.c\N{ZERO WIDTH JOINER}om",
    "x\N{SOFT HYPHEN}.com",
    "x.c\N{COMBINING GRAPHEME JOINER}om",
    "x.c\N{VARIATION SELECTOR-16}om",
    "x.c\N{HANGUL FILLER}om",
    "\uff58\uff0e\uff43\uff4f\uff4d",
    "=?utf-8?q?=3Cevil=40elsewhere?= evil.com",
]
NO_LINKS = [
    "Hopper & Partners",
    "Smith, Jones & Co. (London) Ltd.",
    "J.R.R. Tolkien",
    "J.Smith",
    "St. John",
    "12 High St., Flat 3.b",
    "SMI/123.4-12.03.2024",
    "£1,250.00",
    "Zoë",
    "王小明",
    "नरेन्द्र",
    "می\N{ZERO WIDTH NON-JOINER}خواهم",
    "@home",
    "...",
]


@pytest.mark.parametrize("text", LINKS)
@pytest.mark.parametrize("field", WORDS)
def test_text_with_a_link_is_left_out_of_the_email(field: str, text: str) -> None:
    message = received(compose(**{field: text}))

    for part in (message["To"], message["Reply-To"], message["Subject"], body(message, "plain")):
        assert text not in part
    assert text not in html.unescape(body(message, "html"))
    assert address(message, "To")[1] == "ada@customer.example.com"


@pytest.mark.parametrize("text", NO_LINKS)
def test_text_without_a_link_is_shown(text: str) -> None:
    message = received(compose_all_of(text))

    assert f"Dear {text} {text},\n" in body(message, "plain")
    assert f"Sent by: {text} {text}, {text}\nReference: {text}\n" in body(message, "plain")


def test_email_without_any_words_of_the_caller_still_brings_the_link() -> None:
    message = received(compose_all_of("evil.com"))

    assert body(message, "plain").startswith("Hello,\n\nAcme has asked us")
    assert "Sent by" not in body(message, "plain")
    assert "reply to this e-mail and\nAcme will get your message" in body(message, "plain")
    assert body(message, "plain").splitlines().count(URL) == 1


_PIECES = (
    "evil",
    "x",
    "com",
    "co.uk",
    "law",
    "www.",
    ".",
    "。",
    "\uff0e",
    "://",
    "http",
    "@",
    "/",
    "\\",
    " ",
    "-",
    "_",
)
_UNSEEN = ("\u200b", "\u200d", "\u00ad", "\u034f", "\ufe0f", "\u3164", "\u2060")
_any_text = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=80)
_texts = st.one_of(
    _any_text,
    st.lists(st.one_of(st.sampled_from((*_PIECES, *_UNSEEN)), _any_text), min_size=1, max_size=8).map(
        "".join
    ),
)
_linkifier = LinkifyIt(options={"fuzzy_ip": True}).tlds(TLDS)


@given(words=st.fixed_dictionaries(dict.fromkeys(WORDS, _texts)))
@hypothesis.settings(deadline=None, max_examples=500)
def test_linkifier_finds_no_link_in_the_email_but_ours(words: dict[str, str]) -> None:
    message = received(compose(**words))

    shown = [
        address(message, "To")[0],
        address(message, "Reply-To")[0],
        message["Subject"],
        body(message, "plain").replace(URL, ""),
        html.unescape(re.sub("<[^>]*>", "", body(message, "html").replace(URL, ""))),
    ]
    for text in shown:
        assert not _linkifier.test(text)
        assert not _linkifier.test(unicodedata.normalize("NFKC", text))


def test_html_in_a_field_is_shown_and_not_obeyed() -> None:
    attack = '<script>alert("x")</script> & <a href="/evil">'
    message = received(compose_all_of(attack))

    page = body(message, "html")
    assert "<script" not in page
    assert page.count("<a ") == 1
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; &lt;a" in page
    assert attack in body(message, "plain")


def test_lines_are_no_longer_than_mail_allows() -> None:
    for text in ("x" * 255, "é" * 255):
        message = compose_all_of(text)

        assert max(len(line) for line in message.as_bytes().split(b"\r\n")) <= 998


def test_customer_with_an_international_domain_is_addressed_in_ascii() -> None:
    request = msgspec.structs.replace(A_STORED_REQUEST, customer_email="ada@bücher.example.com")

    assert mail_message.recipient_of(request) == "ada@xn--bcher-kva.example.com"
    message = received(compose(customer_email="ada@bücher.example.com"))
    assert address(message, "To")[1] == "ada@xn--bcher-kva.example.com"


@pytest.mark.parametrize(
    "attack",
    [
        "=?utf-8?q?x=0D=0ABcc=3A_evil=40elsewhere=2Eexample?=",
        "=?utf-8?q?x=0ABcc=3A_evil=40elsewhere=2Eexample?= " + "y" * 80,
        "=?utf-8?b?eA0KQmNjOiBldmlsQHguZXhhbXBsZQ==?= é",
        "=?utf-8?q?=3Cevil=40elsewhere=2Eexample=3E=2C?=",
    ],
)
def test_encoded_word_in_a_field_adds_no_header_and_no_address(attack: str) -> None:
    message = received(compose_all_of(attack))

    assert message.keys() == received(compose()).keys()
    assert address(message, "To")[1] == "ada@customer.example.com"
    assert address(message, "Reply-To")[1] == "grace@firm.example.com"


def test_no_line_is_longer_than_mail_allows_when_all_of_it_has_to_be_escaped() -> None:
    text = "<" * 255

    message = compose_all_of(text)

    assert max(len(line) for line in message.as_bytes().split(b"\r\n")) <= 998
    assert text in body(received(message), "plain")


def test_sender_with_an_international_domain_is_addressed_in_ascii() -> None:
    message = compose(sender_email="grace@bücher.example.com")

    assert address(received(message), "Reply-To")[1] == "grace@xn--bcher-kva.example.com"
    assert message.as_bytes().isascii()


# The mail server


@pytest.fixture
def settings(mail_server: MailServer) -> WorkerSettings:
    """Settings for mail alone."""
    return mail_settings(mail_server.url)


def mail_settings(url: str, **changes: Any) -> WorkerSettings:
    """Return settings that lead to a mail server, and to nothing else."""
    return WorkerSettings(
        database_url="postgresql://nowhere.invalid/",
        app_url="https://app.example.com",
        request_secret_keys=SECRET_KEYS,
        amqp_url="amqp://nowhere.invalid/",
        smtp_url=url,
        mail_from="Calculations <calculations@service.example.com>",
        **{"smtp_timeout_seconds": 5.0, "smtp_answer_seconds": 0.5, **changes},
    )


@pytest.fixture
async def rude_server() -> AsyncIterator[ScriptedMailServer]:
    """A mail server without manners."""
    async with ScriptedMailServer() as server:
        yield server


@pytest.fixture
async def rude_mailer(rude_server: ScriptedMailServer) -> AsyncIterator[Mailer]:
    """A mailer that has to do with a rude mail server."""
    rude = Mailer(mail_settings(rude_server.url, smtp_timeout_seconds=0.5))
    yield rude
    await rude.close()


async def send(with_mailer: Mailer) -> str:
    """Send an e-mail; return the reply."""
    envelope = Envelope(SENDER.address, "ada@customer.example.com")
    return await with_mailer.send(envelope, compose().as_bytes(), before_content=lambda: None)


async def test_reply_of_the_mail_server_is_returned(
    settings: WorkerSettings, mail_server: MailServer
) -> None:
    mail_server.data_reply = "250 queued as 4711"
    with_mailer = Mailer(settings)

    reply = await send(with_mailer)

    await with_mailer.close()
    assert reply == "queued as 4711"


async def test_connection_is_kept_for_the_next_email(
    rude_server: ScriptedMailServer, rude_mailer: Mailer
) -> None:
    for _ in range(3):
        await send(rude_mailer)

    assert (rude_server.connections, len(rude_server.contents)) == (1, 3)


async def test_emails_at_the_same_time_do_not_share_a_connection(
    rude_server: ScriptedMailServer, rude_mailer: Mailer
) -> None:
    await asyncio.gather(*(send(rude_mailer) for _ in range(3)))

    assert (rude_server.connections, len(rude_server.contents)) == (3, 3)


@pytest.mark.parametrize(
    ("command", "answer", "is_final"),
    [
        ("RCPT", b"550 No such user", True),
        ("RCPT", b"450 Busy", False),
        ("content", b"554 Spam", True),
        ("content", b"452 Full", False),
    ],
)
async def test_refusal_tells_whether_it_is_final_and_keeps_the_connection(
    rude_server: ScriptedMailServer, rude_mailer: Mailer, *, command: str, answer: bytes, is_final: bool
) -> None:
    usual, rude_server.replies[command] = rude_server.replies[command], answer

    with pytest.raises(EmailRefused) as refused:
        await send(rude_mailer)

    rude_server.replies[command] = usual
    await send(rude_mailer)
    assert (refused.value.reply, refused.value.is_final) == (answer.decode(), is_final)
    assert rude_server.connections == 1


@pytest.mark.parametrize("command", ["DATA", "content"])
@pytest.mark.parametrize("answer", [None, b"nonsense", b"250-and so on"])
async def test_without_a_reply_to_the_content_the_email_is_charged_an_attempt(
    rude_server: ScriptedMailServer, rude_mailer: Mailer, *, command: str, answer: bytes | None
) -> None:
    rude_server.replies[command] = answer

    with pytest.raises(EmailRefused) as unknown:
        await send(rude_mailer)

    assert not unknown.value.is_final


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        *itertools.product(["greeting", "EHLO", "MAIL"], [None, b"421 Going down", b"nonsense"]),
    ],
)
async def test_mail_server_that_breaks_off_is_unavailable(
    rude_server: ScriptedMailServer, rude_mailer: Mailer, *, command: str, answer: bytes | None
) -> None:
    usual, rude_server.replies[command] = rude_server.replies[command], answer

    with pytest.raises(MailServerUnavailable):
        await send(rude_mailer)

    rude_server.replies[command] = usual
    await send(rude_mailer)


@pytest.mark.parametrize("answer", [None, b"421 Not for this one", b"nonsense", b"250-and so on"])
async def test_email_at_whose_recipient_the_mail_server_breaks_off_twice_is_charged_an_attempt(
    rude_server: ScriptedMailServer, rude_mailer: Mailer, answer: bytes | None
) -> None:
    usual, rude_server.replies["RCPT"] = rude_server.replies["RCPT"], answer

    with pytest.raises(EmailRefused) as refused:
        await send(rude_mailer)

    assert not refused.value.is_final
    assert refused.value.code == (421 if answer == b"421 Not for this one" else 0)
    assert rude_server.connections == 2
    rude_server.replies["RCPT"] = usual
    await send(rude_mailer)


@pytest.mark.parametrize("command", ["MAIL", "RCPT"])
@pytest.mark.parametrize("answer", [None, b"421 Enough of this connection", b"nonsense"])
async def test_mail_server_that_breaks_off_once_is_asked_again_on_a_new_connection(
    rude_server: ScriptedMailServer, rude_mailer: Mailer, *, command: str, answer: bytes | None
) -> None:
    await send(rude_mailer)
    rude_server.replies_once[command] = answer

    await send(rude_mailer)

    assert (rude_server.connections, len(rude_server.contents)) == (2, 2)


async def test_mail_server_that_goes_down_while_an_email_is_sent_is_unavailable(
    rude_server: ScriptedMailServer, rude_mailer: Mailer
) -> None:
    rude_server.replies["RCPT"] = b"421 Going down"
    rude_server.replies_once["greeting"] = rude_server.replies["greeting"]
    rude_server.replies["greeting"] = b"421 Going down"

    with pytest.raises(MailServerUnavailable):
        await send(rude_mailer)


@pytest.mark.parametrize("command", ["DATA", "content"])
async def test_mail_server_that_breaks_off_at_the_content_has_refused_it_for_now(
    rude_server: ScriptedMailServer, rude_mailer: Mailer, command: str
) -> None:
    rude_server.replies[command] = b"421 Not this one"

    with pytest.raises(EmailRefused) as refused:
        await send(rude_mailer)

    assert (refused.value.code, refused.value.is_final) == (421, False)
    assert rude_server.connections == 1  # It may have been accepted: never again at once.


@pytest.mark.parametrize("command", ["greeting", "EHLO", "MAIL"])
async def test_mail_server_that_says_nothing_is_unavailable(
    rude_server: ScriptedMailServer, rude_mailer: Mailer, command: str
) -> None:
    rude_server.replies[command] = b"250-and so on"  # A reply that is never finished.

    with pytest.raises(MailServerUnavailable):
        await send(rude_mailer)


async def test_idle_connection_that_was_closed_is_replaced_without_a_failure(
    rude_server: ScriptedMailServer, rude_mailer: Mailer
) -> None:
    await send(rude_mailer)
    rude_server.hang_up()

    await send(rude_mailer)

    assert (rude_server.connections, len(rude_server.contents)) == (2, 2)


async def test_mail_server_without_encryption_is_unavailable_when_encryption_is_asked_for(
    rude_server: ScriptedMailServer,
) -> None:
    for scheme in ("smtp+starttls", "smtps"):
        url = rude_server.url.replace("smtp", scheme, 1)

        with pytest.raises(MailServerUnavailable):
            await send(Mailer(mail_settings(url, smtp_timeout_seconds=0.5)))

    assert rude_server.contents == []


async def test_password_is_given_to_nobody_who_does_not_ask(rude_server: ScriptedMailServer) -> None:
    url = rude_server.url.replace("//", "//user:hunter2@", 1)

    with pytest.raises(MailServerUnavailable):
        await send(Mailer(mail_settings(url)))

    assert rude_server.contents == []


# Over TLS

ENCRYPTED = ["smtp+starttls", "smtps"]
LOGIN = Login("sender@service.example.com", "pass/word: é@?#%41")


@pytest.mark.parametrize("scheme", ENCRYPTED)
async def test_email_is_sent_encrypted_after_a_login(scheme: str, authority: Authority) -> None:
    async with MailServer(scheme, authority.server_context(), LOGIN) as server:
        with_mailer = Mailer(mail_settings(server.url))

        await send(with_mailer)
        await send(with_mailer)

        await with_mailer.close()
    assert [mail.recipients for mail in server.accepted] == [["ada@customer.example.com"]] * 2
    assert server.logins == 1


@pytest.mark.parametrize("scheme", ENCRYPTED)
@pytest.mark.parametrize("login", [None, Login(LOGIN.name, "hunter2")], ids=["none", "wrong"])
async def test_mail_server_that_refuses_the_login_is_unavailable(
    scheme: str, login: Login | None, authority: Authority
) -> None:
    async with MailServer(scheme, authority.server_context(), LOGIN) as server:
        with pytest.raises(MailServerUnavailable):
            await send(Mailer(mail_settings(server.url_for(login))))

    assert server.accepted == []


@pytest.mark.parametrize("scheme", ENCRYPTED)
@pytest.mark.parametrize("fault", ["expired", "of another host", "of another authority"])
async def test_mail_server_with_a_bad_certificate_is_given_neither_login_nor_email(
    scheme: str, fault: str, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "another").mkdir()
    context = {
        "expired": lambda: authority.server_context(days=-1),
        "of another host": lambda: authority.server_context(address="127.0.0.2"),
        "of another authority": lambda: Authority(tmp_path / "another").server_context(),
    }[fault]()
    async with MailServer(scheme, context, LOGIN) as server:
        with pytest.raises(MailServerUnavailable):
            await send(Mailer(mail_settings(server.url)))

    assert (server.logins, server.accepted) == (0, [])
