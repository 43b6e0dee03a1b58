"""Reads what a mail server reports later about an e-mail that it, or another server, had accepted.

Most servers send a delivery status notification (RFC 3464). Older releases of Exim send a text for people
with the header X-Failed-Recipients.
"""

import re
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message

import msgspec

from service.calculation_requests.email_changes import EmailId
from service.calculation_requests.request_secrets import SecretKeyRing
from worker.mail import tokens
from worker.mail.replies import NO_REPLY, Reply, storable

LARGEST_BYTES = 256 * 1024  # of a message that are read. A report of our small e-mails has less.
# Reports have about six at most. Parsing 32 nested parts takes 0.4 s; parsing 900 would take 11 s.
_MOST_BOUNDARIES = 32

_SOFT_BREAK = re.compile(r"=\r?\n")  # of quoted-printable, in which a server may return the headers
_STATUS = re.compile(r"[245]\.\d{1,3}\.\d{1,3}")
_SMTP_REPLY = re.compile(r"([45]\d\d)(?:[ -]|$)\s*(.*)", re.DOTALL)
# In Exim's text: an indented line, and those that continue it. Without the bound, time grows quadratically.
_SMTP_REPLY_IN_TEXT = re.compile(r"^[ ]{1,20}(?:.*: )?([45]\d\d[ -].*(?:\n[ ].*)*)", re.MULTILINE)
_LONGEST_REPLY = 4000  # characters. The next pattern takes quadratic time.
_ADDRESS = re.compile(r"[^\s<>@]+@[^\s<>@]+")


class Report(msgspec.Struct, frozen=True):
    """What happened to an e-mail: it has failed for good or, if it *is_delayed*, may still be delivered."""

    email: EmailId
    is_delayed: bool
    reply: Reply  # of the server that refused the e-mail, or else the words of the one that reports


def read(content: bytes, keys: SecretKeyRing) -> Report | None:
    """Return what the first LARGEST_BYTES of a message report, or None if the message is no report.

    Nor is it one if no token in it is ours. The tokens are looked for first, because only a recipient of our
    e-mails can make the parser work.
    """
    content = content[:LARGEST_BYTES]
    email = tokens.find(_SOFT_BREAK.sub("", content.decode("ascii", "replace")), keys)
    if email is None or len(re.findall(b"(?i)boundary", content)) > _MOST_BOUNDARIES:
        return None
    try:
        message = message_from_bytes(content)
        reports = [*_delivery_statuses(message)] or [*_report_of_exim(message)]
    except Exception:  # noqa: BLE001 - such as RecursionError, from messages in messages
        return None
    # Our e-mails have one recipient, but the recipient's server may have forwarded them to several.
    by_action = dict(reversed(reports))  # the first reply of each action
    for action in ("failed", "delayed"):
        if action in by_action:
            return Report(email, is_delayed=action == "delayed", reply=by_action[action])
    return None


def _delivery_statuses(message: Message) -> Iterator[tuple[str, Reply]]:
    """Yield action and reply for each recipient (RFC 3464, section 2.3)."""
    for part in _parts(message):
        if part.get_content_type() == "message/delivery-status":
            for fields in _parts(part):
                if action := str(fields.get("Action", "")).split():
                    diagnostic = str(fields.get("Diagnostic-Code", ""))
                    kind, _, words = diagnostic.partition(";")
                    is_reply = kind.strip().lower() == "smtp"
                    yield action[0].lower(), _reply(words, str(fields.get("Status", "")), is_reply=is_reply)


def _report_of_exim(message: Message) -> Iterator[tuple[str, Reply]]:
    """Yield the failure that Exim reports for people, without the copy of our e-mail that follows it."""
    if "X-Failed-Recipients" in message and not message.is_multipart():
        payload = message.get_payload(decode=True)
        text = payload.decode("ascii", "replace") if isinstance(payload, bytes) else ""
        text, _, _ = text.partition("\n------")
        found = _SMTP_REPLY_IN_TEXT.search(text)
        yield "failed", _reply(found[1] if found else "", "", is_reply=True)


def _parts(message: Message) -> list[Message]:
    payload = message.get_payload()
    return [part for part in payload if isinstance(part, Message)] if isinstance(payload, list) else []


def _reply(words: str, status: str, *, is_reply: bool) -> Reply:
    """Return the reply of a server in one line, without addresses, and with the status before its words."""
    words = _ADDRESS.sub("[address]", " ".join(words[:_LONGEST_REPLY].split()))
    found = _SMTP_REPLY.match(words) if is_reply else None
    code, words = (int(found[1]), found[2]) if found else (NO_REPLY, words)
    if (stated := _STATUS.search(status)) and not _STATUS.match(words):
        words = f"{stated[0]} {words}"
    return Reply("report", code, storable(words.strip()) or "no reason given")
