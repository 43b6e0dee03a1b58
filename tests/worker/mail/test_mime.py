"""The source of an e-mail is as Python's email.message would write it."""

from email.errors import HeaderParseError
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.worker.mail.composing import address, body, received, squeezed
from worker.mail import mime

_CHARACTERS = st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"])
_NAMES = st.text(_CHARACTERS, max_size=64).map(lambda name: " ".join(name.replace("=?", "").split()))
_SUBJECTS = st.text(_CHARACTERS, min_size=1, max_size=300).map(
    lambda words: " ".join(words.replace("=?", "").split())
)
_ADDRESSES = st.emails().filter(str.isascii)
_CONTENTS = st.lists(st.text(_CHARACTERS, max_size=1200) | st.just("."), min_size=1).map("\n".join)
_LONG = ("x" * 64, "é" * 64, "\N{GRINNING FACE}" * 64)


def reference(name: str, mailbox: str, subject: str, text: str, html: str) -> EmailMessage:
    """Return the e-mail as email.message makes it."""
    message = EmailMessage(policy=SMTP)
    message["To"] = Address(name, addr_spec=mailbox)
    message["Subject"] = subject
    message.set_content(text)
    message.add_alternative(html, subtype="html")
    return message


@given(_NAMES, _ADDRESSES, _SUBJECTS, _CONTENTS, _CONTENTS)
@example(_LONG[0], "a" * 64 + "@example.com", "x" * 300, "x" * 998, "x" * 999)
@example(_LONG[1], "a@example.com", "é " * 99 + "é", "é" * 999, "= =\n \n")
@example(_LONG[2], "a@example.com", "\N{GRINNING FACE}" * 100, "From a\n.\n..\n", "\t\n")
@example('O\'Brien, "Zo" (A.)', "a@example.com", "a; b, c", "a", "b")
@settings(deadline=None, max_examples=50)
def test_source_is_read_as_that_of_the_reference(name, mailbox, subject, text, html):
    fields = {"To": mime.mailbox("To", name, mailbox), "Subject": mime.words("Subject", subject)}

    source = mime.multipart(fields, text=text, html=html)

    ours, theirs = received(source), reference(name, mailbox, subject, text, html)
    assert list(ours) == list(theirs)
    assert ours.get_content_type() == theirs.get_content_type()
    assert address(ours, "To")[1] == address(theirs, "To")[1] == mailbox
    # Python's parser adds a space between the encoded words of a name, and to a folded long word.
    assert squeezed(address(ours, "To")[0]) == squeezed(address(theirs, "To")[0]) == squeezed(name)
    assert ours["Subject"].strip() == theirs["Subject"].strip() == subject
    for kind, part, other in zip(("plain", "html"), ours.iter_parts(), theirs.iter_parts(), strict=True):
        assert part["Content-Type"] == other["Content-Type"]
        assert body(ours, kind).rstrip("\n") == body(theirs, kind).rstrip("\n")
    assert all(len(line) <= 998 for line in source.split(b"\r\n"))
    assert source.isascii()
    assert b"\n" not in source.replace(b"\r\n", b"")


@pytest.mark.parametrize("line_break", ["\r\n", "\n", "\r"])
def test_value_of_a_header_field_cannot_add_another(line_break):
    with pytest.raises(HeaderParseError):
        mime.mailbox("To", f"Ada{line_break}Bcc: eve@example.com", "ada@example.com")

    with pytest.raises(HeaderParseError):
        mime.words("Subject", f"Ada{line_break}Bcc: eve@example.com")


def test_part_cannot_end_another():
    first = mime.multipart({}, text="a", html="b")
    boundary = first.rsplit(b"--", 2)[1].decode()

    message = received(mime.multipart({}, text=f"--{boundary}--", html="b"))

    assert len(list(message.iter_parts())) == 2
