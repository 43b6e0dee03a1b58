"""The meaning of a mail server's reply for an e-mail: whose fault a refusal is, and the outcome."""

import re
import time
from typing import Literal, NamedTuple, TypeAlias

from worker.mail.ledger import Email, Outcome, Release
from worker.settings import EmailSettings

NO_REPLY = 0  # the code in a `Reply` if there was no reply, or one that cannot belong to the command
_SERVICE_NOT_AVAILABLE = 421  # The mail server closes the connection.

# `recipient`, `message`: this e-mail alone is at fault, so a 5xx is final. `sender`: our login, address or
# machine is at fault, so a 5xx is not final. `passing`: the next attempt may succeed.
Fault: TypeAlias = Literal["recipient", "message", "sender", "passing"]

# The address does not exist (x.1.1, x.1.2, x.1.3, x.1.6, x.1.10), or the mailbox is disabled or full (x.2.1,
# x.2.2; RFC 3463, section 3; RFC 7505). Exchange Online gives 5.4.1 for an unknown address. Gmail also gives
# 4.2.1 for its limit on the sender. Postgres uses this pattern, too.
RECIPIENT_REFUSED = r"^(?!.*relay limit)[45]\d\d (?:[45]\.1\.(?:1|2|3|6|10)|[45]\.2\.[12]|5\.4\.1)(?:\D|$)"

# Codes on the sender's address (x.1.7, x.1.8; RFC 3463, section 3.2), login and encryption (x.7.3, x.7.8 to
# x.7.11; RFC 4954, section 6; RFC 5248), SPF, DKIM and DNS (x.7.20 to x.7.27; RFC 7372, RFC 7505), sending
# quota (5.4.5: Gmail; 5.1.90: Exchange Online), and permission to send (5.2.252, 5.7.57, 5.7.60, 5.7.64,
# 5.7.5xx to 5.7.7xx: Exchange Online).
_SENDER_CODES = (
    r"^[45]\d\d [45]\.(?:1\.(?:7|8|90)|2\.252|4\.5|7\.(?:3|8|9|10|11|2[0-7]|57|60|64|[5-7]\d\d))(?:\D|$)"
)
# Postfix has only words to tell these from others with 5.7.1, and Amazon SES gives no enhanced codes.
_SENDER_WORDS = (
    r"(?i)authenti|\blog(?:ged)? ?in\b|credential|password|authori[sz]ed|permission|not verified|suspended"
    r"|paused|throttling|SendAsDenied|\brelay|\bhelo\b|\behlo\b|\bsender|\bsending|\bclient|\bIP\b|\btls\b|starttls"
)

_POLICY_CODE = r"5\d\d 5\.7\.1(?:\D|$)"  # The recipient's domain accepts no such e-mail.

_LONGEST_REPLY = 1000
# A line break in a quoted link, perhaps in quoted-printable, or with the enhanced code that begins each line.
_BREAK = r"(?:=?\s+(?:[245]\.\d+\.\d+\s+)?)?"
# The secret in any customer's link, which may be encoded or cut off, or 43 such characters alone.
_SECRET = re.compile(
    rf"{_BREAK.join('secret')}{_BREAK}(?:=|%(?:25)*3D)(?:3D)?(?:{_BREAK}(?:[\w-]|[=%](?:25)*[\dA-F]{{2}})){{0,43}}"
    r"|(?<![\w-])[\w-]{43}(?![\w-])",
    re.IGNORECASE | re.ASCII,
)


class Reply(NamedTuple):
    """A mail server's reply to a command, or to the content of an e-mail."""

    to: str  # connection (which includes EHLO, STARTTLS and the login), MAIL, RCPT or content (DATA, too)
    code: int
    text: str = ""

    @property
    def words(self) -> str:
        """The code and text of the reply, or why there is no reply."""
        return f"{self.code} {self.text}" if self.code else self.text

    @property
    def is_acceptance(self) -> bool:
        """Whether the command was carried out. Otherwise the reply, or its absence, is a refusal."""
        return NO_REPLY < self.code < 400

    @property
    def fault(self) -> Fault:
        """Whose fault a refusal of RCPT or the content is. tests/worker/mail/replies.txt has examples."""
        # A quoted address may contain any word.
        plain = re.sub(r"<[^>]*>|\S*@\S*", "", f"{self.code} {self.text}")
        if self.code in {NO_REPLY, _SERVICE_NOT_AVAILABLE}:
            return "passing"
        if re.search(RECIPIENT_REFUSED, plain):
            return "recipient"
        if re.search(_SENDER_CODES, plain) or re.search(_SENDER_WORDS, plain):
            return "sender"
        if self.code < 500:
            return "passing"
        if self.to == "content":
            return "message"
        return "recipient" if re.match(_POLICY_CODE, plain) else "sender"


def outcome_of(reply: Reply, email: Email, settings: EmailSettings, *, others_accepted: bool) -> Outcome:
    """Return the outcome that a mail server's reply to RCPT or the content has for an e-mail.

    A 5xx is final, unless the sender is at fault: our address, login or machine. Other refusals, and no reply
    to the content, postpone the e-mail, for pauses that double, until it is older than EMAIL_GIVE_UP_SECONDS.
    Then it fails, but not at its first attempt, which may follow a long outage. If the sender is at fault, it
    fails only if the mail server has lately accepted others, because a fault of ours must not fail many.
    """
    if reply.is_acceptance:
        return email.ended(reply.text)
    fault = reply.fault
    if reply.code >= 500 and fault != "sender":
        return email.ended(reply.words, "refused", reply.code)
    age = time.monotonic() - email.added
    if email.attempts and age >= settings.email_give_up_seconds and (fault != "sender" or others_accepted):
        return email.ended(reply.words, "gave_up", reply.code)
    # A larger power, such as 2 ** 1024, may be too large for a float.
    doubled = settings.email_retry_seconds * 2 ** min(email.attempts, 30)
    pause = min(doubled, settings.longest_email_pause_seconds)
    return Release(email.id, "postponed", pause, reply.words, reply.code)


def given_back(email: Email, reply: Reply | None = None) -> Release:
    """Return the outcome `given_back`, perhaps with the reply that shows an outage of the mail server."""
    words, code = (reply.words, reply.code) if reply else (None, 0)
    return Release(email.id, "given_back", reply=words, smtp_code=code)


def storable(text: str) -> str:
    """Return a server's text as it may be stored: cut, without secrets of links, NUL and surrogates."""
    # The second cut removes a secret that the first one may have made too short to be recognized.
    text = text[: 2 * _LONGEST_REPLY].encode(errors="surrogateescape").decode(errors="replace")
    return _SECRET.sub("[secret]", text.replace("\0", "\N{REPLACEMENT CHARACTER}"))[:_LONGEST_REPLY]


def counted_as(outcome: Outcome) -> str:
    """Return the outcome's label in the metric, where `recipient_refused` is counted apart from `failed`."""
    refuses_recipient = re.match(RECIPIENT_REFUSED, outcome.reply or "")
    return "recipient_refused" if outcome.label == "failed" and refuses_recipient else outcome.label
