"""Decides the outcome that a mail server's reply has for an e-mail, and what of the reply is stored."""

import re
from datetime import UTC, datetime

from worker.mail.ledger import Email, Outcome, Release
from worker.mail.replies import RECIPIENT_REFUSED, Reply
from worker.settings import EmailSettings

_LONGEST_REPLY = 1000
_MOST_DOUBLINGS = 30  # 2 ** 1024 would be too large for a float.
# What may be inside a link in a reply, if the mail server folds its lines or quotes them as quoted-printable.
_LINE_BREAK = r"=?\s+"
# The parameter of a link, from its name to the end of the secret, which the mail server may have cut off.
_SECRET_FIELD = re.compile(r"secret(?:=|%3D)(?:3D)?(?:[\w-]|=?\s*\n)*", re.IGNORECASE)


def outcome_of(reply: Reply, email: Email, settings: EmailSettings, *, others_accepted: bool) -> Outcome:
    """Return the outcome that a mail server's reply to RCPT or the content has for an e-mail.

    A 5xx is final, unless the sender is at fault: our address, login or machine. Other refusals postpone the
    e-mail, for pauses that double, until the e-mail is older than EMAIL_GIVE_UP_SECONDS. Then it fails. But a
    fault of ours must not fail many e-mails. So if the sender is at fault, the e-mail fails only if the mail
    server has lately accepted others.
    """
    if reply.is_acceptance:
        return email.ended(reply.text)
    fault = reply.fault
    if reply.code >= 500 and fault != "sender":
        return email.ended(reply.words, "refused", reply.code)
    age = (datetime.now(UTC) - email.created_at).total_seconds()
    if age >= settings.email_give_up_seconds and (fault != "sender" or others_accepted):
        return email.ended(reply.words, "gave_up", reply.code)
    doubled = settings.email_retry_seconds * 2 ** min(email.attempts, _MOST_DOUBLINGS)
    pause = min(doubled, settings.longest_email_pause_seconds)
    return Release(email.email_key, "postponed", pause, reply.words, reply.code)


def given_back(email: Email, outage: Reply | None = None) -> Release:
    """Return the outcome `given_back`, perhaps with the reply that shows an outage of the mail server."""
    words, code = (outage.words, outage.code) if outage else (None, 0)
    return Release(email.email_key, "given_back", reply=words, smtp_code=code)


def storable(text: str, secret: str) -> str:
    """Return a reply's text as Postgres can store it, without the *secret* of a link that it quotes."""
    # Compile the pattern only if it is needed. Compiling it for every reply halved the rate of e-mails.
    if secret in re.sub(_LINE_BREAK, "", text):
        text = re.sub(f"(?:{_LINE_BREAK})?".join(map(re.escape, secret)), "[secret]", text)
    text = _SECRET_FIELD.sub("secret=[secret]", text).encode(errors="replace").decode()
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")[:_LONGEST_REPLY]


def counted_as(outcome: Outcome) -> str:
    """Return the outcome's label in the metric, where `recipient_refused` is counted apart from `failed`."""
    refuses_recipient = re.match(RECIPIENT_REFUSED, outcome.reply or "")
    return "recipient_refused" if outcome.label == "failed" and refuses_recipient else outcome.label
