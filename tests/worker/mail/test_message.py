"""The headers and the text of an e-mail."""

import html

import pytest

from tests.worker.mail.composing import DATE, URL, address, body, compose, compose_all_of, received, squeezed


def test_email_has_the_headers_of_an_automatic_message():
    message = received(compose())

    assert message["Message-ID"] == "<event-1@service.example.com>"
    assert message["Date"].datetime == DATE
    assert message["Auto-Submitted"] == "auto-generated"


@pytest.mark.parametrize("first_name", ["Ada", "Zoë", "王"], ids=["ASCII", "Latin", "Chinese"])
def test_link_is_on_a_line_of_its_own(first_name):
    message = received(compose(customer_first_name=first_name))

    assert body(message, "plain").splitlines().count(URL) == 1
    assert body(message, "html").splitlines().count(URL) == 1


def test_link_is_broken_at_the_edge_of_a_narrow_screen():
    assert f'<a href="{URL}" style="word-break: break-all">' in body(received(compose()), "html")


def test_link_is_not_encoded_on_the_wire_when_the_text_is_ascii():
    assert f"\r\n{URL}\r\n".encode() in compose()


@pytest.mark.parametrize(
    ("first_name", "last_name"),
    [
        ("Ada\\", 'O\'Brien, "Zo" (A.)'),
        ("Ada;", "[Lovelace]: <evil@elsewhere>, Countess of somewhere far away and of many other places"),
        ("👩‍💻", "😀"),
        ("é" * 255, "ü, " * 80),
        ("x" * 255, "y" * 255),
        ("Dr. J. R. R.", "T. " * 80),
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
def test_subject_and_first_sentence_name_the_registered_conveyancer(firm):
    message = received(compose(firm))

    name = " ".join(firm.split())
    subject = f"Your Stamp Duty Land Tax calculation for {name}"
    assert squeezed(message["Subject"]) == squeezed(subject)
    assert f"<title>{html.escape(subject)}</title>" in body(message, "html")
    for kind in ("plain", "html"):
        assert html.unescape(body(message, kind)).count(f"{name} has asked us to work out") == 1


def test_organisation_and_reference_are_shown_beside_the_registered_name():
    message = received(compose(sender_organization_name="Barclays Fraud Team"))

    assert "Barclays" not in message["Subject"]
    for kind in ("plain", "html"):
        lines = html.unescape(body(message, kind)).splitlines()
        assert sum(line.startswith("Sent by: Grace Hopper, Barclays Fraud Team") for line in lines) == 1
        assert sum(line.startswith("Reference: 12 High Street") for line in lines) == 1


def test_html_in_a_field_is_escaped():
    attack = '<script>alert("x")</script> & <a href="/evil">'
    message = received(compose_all_of(attack))

    page = body(message, "html")
    assert "<script" not in page
    assert page.count("<a ") == 1
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; &lt;a" in page
    assert attack in body(message, "plain")
