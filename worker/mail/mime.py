"""The source of an e-mail: header fields, and a text with its HTML alternative (RFC 5322, RFC 2045 to 2047).

Python's email.message writes the same e-mail, but that took two thirds of the whole time of sending.
"""

import hashlib
from binascii import b2a_qp
from collections.abc import Mapping
from email.header import Header
from email.utils import formataddr

_LONGEST_LINE = 998  # RFC 5322, section 2.1.1
_FOLDED_LINE = 76  # the length at which Header folds


def multipart(fields: Mapping[str, str], *, text: str, html: str) -> bytes:
    """Return an e-mail with these ASCII header fields. Equal arguments make equal e-mails."""
    parts = (_part("plain", text), _part("html", html))
    # The boundary cannot occur in the parts, because they would have to contain their own hash.
    boundary = hashlib.sha256(b"".join(parts)).hexdigest()
    head = {
        **fields,
        "MIME-Version": "1.0",
        "Content-Type": f'multipart/alternative;\r\n boundary="{boundary}"',
    }
    delimiter = f"\r\n--{boundary}".encode()
    return b"".join((_head(head), *(delimiter + b"\r\n" + part for part in parts), delimiter + b"--\r\n"))


def _part(subtype: str, content: str) -> bytes:
    """Return a part. ASCII is not encoded, so that the link stays unbroken even in the source."""
    lines = content.encode().splitlines()
    body = b"\r\n".join((*lines, b""))
    is_plain = content.isascii() and all(len(line) <= _LONGEST_LINE for line in lines)
    head = {
        "Content-Type": f'text/{subtype}; charset="utf-8"',
        "Content-Transfer-Encoding": "7bit" if is_plain else "quoted-printable",
    }
    return _head(head) + (body if is_plain else b2a_qp(body))


def _head(fields: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode("ascii") + b"\r\n"


def words(field: str, text: str) -> str:
    """Return *text*, which has no line breaks, as a header field: folded, and encoded if not ASCII."""
    # Header would return this text unchanged, but takes longer than all the rest of an e-mail.
    if text.isascii() and text.isprintable() and len(f"{field}: {text}") <= _FOLDED_LINE:
        return text
    return Header(text, header_name=field).encode(linesep="\r\n")


def mailbox(field: str, name: str, address: str) -> str:
    """Return a mailbox as the value of a header field. *name* must have no line breaks."""
    if name.isascii():
        return words(field, formataddr((name, address)))
    value = Header(name, header_name=field)
    value.append(f"<{address}>")
    return value.encode(linesep="\r\n")
