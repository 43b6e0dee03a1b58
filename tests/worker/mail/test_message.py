"""The headers and the text of an e-mail."""

import html
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.calculation_requests.email_changes import Kind
from tests.worker.mail.composing import (
    DATE,
    TOKEN,
    URL,
    address,
    body,
    compose,
    compose_all_of,
    received,
)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_email_of_each_kind_has_the_headers_of_an_automatic_message(kind):
    message = received(compose(kind=kind))

    assert message["Message-ID"] == message["Calculation-Request-Email"] == f"<{TOKEN}@service.example.com>"
    assert message["Date"].datetime == DATE
    assert message["Auto-Submitted"] == "auto-generated"


@pytest.mark.parametrize(
    ("first_name", "last_name"),
    [
        ("Ada\\", 'O\'Brien, "Zo" (A.)'),
        ("Ada;", "[Lovelace]: <evil@elsewhere>, Countess of somewhere far away and of many other places"),
        ("👩‍💻", "😀"),
        ("=?utf-8?q?Eve?=", "Lovelace"),
        ("x" * 255, "y" * 255),
    ],
)
def test_any_name_remains_one_mailbox(first_name, last_name):
    names = {"customer_first_name": first_name, "customer_last_name": last_name}
    message = received(compose(**names, sender_first_name=first_name, sender_last_name=last_name))

    name = f"{first_name} {last_name}"
    for header, expected in (("To", "ada@customer.example.com"), ("Reply-To", "grace@firm.example.com")):
        shown, addressed = address(message, header)
        assert addressed == expected
        assert shown
        assert letters(name).startswith(letters(shown))
    assert f"Dear {name}," in body(message, "plain")


def letters(text: str) -> str:
    """Return the letters and digits of *text*: a header may only lose those at the end of a long name."""
    return "".join(character for character in text if character.isalnum())


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize(
    "firm",
    [
        "Hopper & Partners",
        "conveyancing.example.com",
        "x" * 255,
        "ö" * 255,
        "<b>Bold</b>",
        "A\nB\u2028C\x85D\x0bE",
    ],
)
def test_subject_and_first_sentence_name_the_registered_conveyancer(firm, kind):
    message = received(compose(firm, kind=kind))

    name, page = " ".join(firm.split()), body(message, "html")
    title = page.partition("<title>")[2].partition("</title>")[0]
    assert html.escape(name) in title
    assert "".join(message["Subject"].split()) == "".join(html.unescape(title).split())  # It may be folded.
    assert body(message, "plain").split("\n\n")[1].startswith(f"{name} ")
    assert page.split("</p>\n<p>")[1].startswith(f"{html.escape(name)} ")


def test_organisation_and_reference_are_shown_beside_the_registered_name():
    message = received(compose(sender_organization_name="Barclays Fraud Team"))

    assert "Barclays" not in message["Subject"]
    for kind in ("plain", "html"):
        lines = html.unescape(body(message, kind)).replace("<p>", "").splitlines()
        assert sum(line.startswith("Sent by: Grace Hopper, Barclays Fraud Team") for line in lines) == 1
        assert sum(line.startswith("Reference: 12 High Street") for line in lines) == 1


@pytest.mark.parametrize("kind", get_args(Kind))
def test_html_in_a_field_is_escaped(kind):
    attack = '<script>alert("x")</script> & <a href="/evil">'
    message = received(compose_all_of(attack, kind=kind))

    page = body(message, "html")
    assert "<script" not in page
    assert page.count("<a ") == body(message, "plain").count(URL)
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; &lt;a" in page
    assert attack in body(message, "plain")


_CHARACTERS = st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"])


@given(st.text(_CHARACTERS, min_size=1, max_size=255), st.text(_CHARACTERS, max_size=300))
@example("x" * 255, "x" * 300)
@example("é" * 255, "é " * 150)
@example("\N{GRINNING FACE}" * 64, "\N{GRINNING FACE}" * 100)
@example(".\n..\nFrom a", "= =")
@settings(deadline=None, max_examples=50)
def test_source_has_short_lines_of_ascii_that_are_read_as_they_were_meant(name, firm):
    source = compose(firm, customer_first_name=name, customer_last_name="", case_ref=name)

    assert source.isascii()
    assert b"\n" not in source.replace(b"\r\n", b"")
    assert all(len(line) <= 998 for line in source.split(b"\r\n"))
    message = received(source)
    assert list(message) == list(received(compose()))
    assert not any(value.defects for value in message.values())
    assert len(list(message.iter_parts())) == 2
    for kind in ("plain", "html"):
        assert body(message, kind).splitlines().count(URL) == 1


def test_part_cannot_end_another():
    boundary = received(compose()).get_boundary()

    message = received(compose(case_ref=f"--{boundary}--"))

    assert len(list(message.iter_parts())) == 2
