"""Decides what a mail server's reply means for an e-mail, and which part of the reply is stored."""

import re
from datetime import UTC, datetime

from service.every_firm.announcing import EmailEnd
from worker.mail.ledger import Email, Postponement
from worker.mail.smtp import Reply
from worker.settings import EmailSettings

# Refusals of one recipient, not of our e-mails: an enhanced status code on the address (x.1) or the mailbox
# (x.2, RFC 3463), or none and a basic code on the mailbox (RFC 5321, section 4.2.3). Postgres uses this, too.
RECIPIENT_REFUSED = r"^[45]\d\d [45]\.[12]\.|^(?:450|55[0-3]) (?![45]\.\d)"

_LONGEST_REPLY = 1000
_LINE_BREAK = r"=?\s+"  # inside a link that is folded or quoted-printable
_SECRET_FIELD = re.compile(r"secret(?:=|%3D)(?:3D)?(?:[\w-]|=?\s*\n)*", re.IGNORECASE)


def outcome_of(
    reply: Reply, email: Email, settings: EmailSettings, *, others_accepted: bool
) -> EmailEnd | Postponement:
    """Return what a mail server's reply means for an e-mail (RFC 5321, section 4.2.1).

    A refused e-mail is retried after pauses that double, unless the refusal is final or the e-mail is older
    than EMAIL_GIVE_UP_SECONDS. If the content gets no reply, an attempt is counted, because the server may
    have accepted the content.

    In an outage no attempt is counted. A provider's limit, reported after the content, is an outage, but may
    concern this e-mail alone. So the pauses grow with its age. Otherwise it would delay all others every
    second. After EMAIL_GIVE_UP_SECONDS it fails, but only if the server has lately accepted other e-mails.
    """
    if reply.is_acceptance:
        return email.ended(reply.text)
    age = (datetime.now(UTC) - email.created_at).total_seconds()
    is_old = age >= settings.email_give_up_seconds
    longest = settings.longest_email_pause_seconds
    if reply.is_outage and not (reply.to == "content" and is_old and others_accepted):
        pause = min(age / 10, longest) if reply.to == "content" else 0.0
        return Postponement(email.email_key, "given_back", pause, reply.words, reply.code)
    if reply.code >= 500:
        return email.ended(reply.words, "refused", reply.code)
    if is_old:
        return email.ended(reply.words, "gave_up", reply.code)
    pause = min(settings.email_retry_seconds * 2**email.attempts, longest)
    return Postponement(email.email_key, "postponed", pause, reply.words, reply.code)


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
