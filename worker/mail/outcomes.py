"""Decides what a mail server's reply means for an e-mail, and which part of the reply is stored."""

import re
from datetime import UTC, datetime

from service.calculation_requests.email_changes import EmailEnd
from worker.mail.ledger import Email, Postponement
from worker.mail.replies import RECIPIENT_REFUSED, Reply
from worker.settings import EmailSettings

_LONGEST_REPLY = 1000
_MOST_DOUBLINGS = 30  # 2 ** 1024 would be too large for a float.
_LINE_BREAK = r"=?\s+"  # inside a link that is folded or quoted-printable
_SECRET_FIELD = re.compile(r"secret(?:=|%3D)(?:3D)?(?:[\w-]|=?\s*\n)*", re.IGNORECASE)


def outcome_of(
    reply: Reply, email: Email, settings: EmailSettings, *, others_accepted: bool
) -> EmailEnd | Postponement:
    """Return what a mail server's reply means for an e-mail.

    A refused e-mail is retried after pauses that double, unless the refusal is final or the e-mail is older
    than EMAIL_GIVE_UP_SECONDS. If our sender address or login seems to be at fault, no e-mail is given up
    until the server has lately accepted others. If the content gets no reply, an attempt is counted, because
    the server may have accepted the content.
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
    return Postponement(email.email_key, "postponed", pause, reply.words, reply.code)


def give_back(email: Email, outage: Reply | None = None) -> Postponement:
    """Return the outcome for an e-mail whose content was not sent, perhaps because of an outage."""
    words, code = (outage.words, outage.code) if outage else (None, 0)
    return Postponement(email.email_key, "given_back", reply=words, smtp_code=code)


def storable(text: str, secret: str) -> str:
    """Return a reply's text as Postgres can store it, without the secret of a quoted link."""
    # Compile the pattern only if it is needed. Compiling it for every reply halved the rate of e-mails.
    if secret in re.sub(_LINE_BREAK, "", text):
        text = re.sub(f"(?:{_LINE_BREAK})?".join(map(re.escape, secret)), "[secret]", text)
    text = _SECRET_FIELD.sub("secret=[secret]", text).encode(errors="replace").decode()
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")[:_LONGEST_REPLY]


def counted_as(outcome: EmailEnd | Postponement) -> str:
    """Return the outcome's label in the metric, which sets apart what is the recipient's doing."""
    refuses_recipient = re.match(RECIPIENT_REFUSED, outcome.reply or "")
    return "recipient_refused" if outcome.label == "failed" and refuses_recipient else outcome.label
