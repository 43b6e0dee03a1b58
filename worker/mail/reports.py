"""Reads delivery status notifications (RFC 3464), in which mail servers report e-mails as undeliverable."""

import re
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from typing import cast

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
_EXIM_REPLY = re.compile(r"(?m)(?:^|:) +([45]\d\d[ -].*)")
_LONGEST_REPLY = 4000  # characters. The next pattern takes quadratic time.
_ADDRESS = re.compile(r"[^\s<>@]+@[^\s<>@]+")


class Report(msgspec.Struct, frozen=True):
    """What happened to an e-mail: it has failed for good or, without a *failure*, is delayed."""

    email: EmailId
    failure: Reply | None  # of the server that refused the e-mail, or else the words of the one that reports


def read(content: bytes, keys: SecretKeyRing) -> Report | None:
    """Return what the first LARGEST_BYTES of a message report, or None if the message is no report.

    Nor is it one if no token in it is ours. The tokens are looked for first, because only a recipient of our
    e-mails can make the parser work.
    """
    text = _SOFT_BREAK.sub("", content[:LARGEST_BYTES].decode("ascii", "replace"))
    email = tokens.find(text, keys)
    if email is None or len(re.findall("(?i)boundary", text)) > _MOST_BOUNDARIES:
        return None
    try:
        message = message_from_bytes(content[:LARGEST_BYTES])
        statuses = [*_delivery_statuses(message)]
    except Exception:  # noqa: BLE001 - such as RecursionError, from messages in messages
        return None
    if not statuses and message["X-Failed-Recipients"]:  # Exim before 4.85 reports failures in words alone.
        statuses = [("failed", _reply("smtp;" + "".join(_EXIM_REPLY.findall(text)[:1]), ""))]
    # Our e-mails have one recipient, but the recipient's server may have forwarded them to several.
    failures = [reply for action, reply in statuses if action == "failed"]
    if failures:
        return Report(email, failures[0])
    return Report(email, None) if any(action == "delayed" for action, _ in statuses) else None


def blames_us(failure: Reply) -> bool:
    """Whether the recipient's server does not trust us, as with any status 5.7.x (RFC 3463, section 3.8)."""
    return failure.fault == "sender" or re.match(r"(?:\d{3} )?5\.7\.", failure.words) is not None


def _delivery_statuses(message: Message) -> Iterator[tuple[str, Reply]]:
    """Yield action and reply for each recipient (RFC 3464, section 2.3)."""
    for part in message.walk():
        if part.get_content_type() == "message/delivery-status":
            for fields in cast("list[Message]", part.get_payload()):
                if action := str(fields.get("Action", "")).split():
                    diagnostic, status = fields.get("Diagnostic-Code", ""), fields.get("Status", "")
                    yield action[0].lower(), _reply(str(diagnostic), str(status))


def _reply(diagnostic: str, status: str) -> Reply:
    """Return the reply of a server in one line, without addresses, and with the status before its words."""
    kind, _, words = diagnostic.partition(";")
    words = _ADDRESS.sub("[address]", " ".join(words[:_LONGEST_REPLY].split()))
    found = _SMTP_REPLY.match(words) if kind.strip().lower() == "smtp" else None
    code, words = (int(found[1]), found[2]) if found else (NO_REPLY, words)
    if (stated := _STATUS.search(status)) and not _STATUS.match(words):
        words = f"{stated[0]} {words}"
    return Reply("content", code, storable(words.strip()) or "no reason given")
