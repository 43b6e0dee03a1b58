"""A mail server's reply, and whose fault a refusal is."""

import re
from typing import Literal, NamedTuple, TypeAlias

# The code in a `Reply` if the mail server sent no reply, or a reply that cannot belong to the command.
NO_REPLY = 0
_SERVICE_NOT_AVAILABLE = 421  # The mail server closes the connection.

# `outage`: no e-mail can be sent now. `recipient`, `message`: a 5xx is final for this e-mail. `sender`: our
# login, address or machine is at fault, so a 5xx is not final. `passing`: the next attempt may succeed.
Fault: TypeAlias = Literal["outage", "recipient", "message", "sender", "passing"]


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
        """Whether the command was carried out. A `Reply` to `connection` is always a refusal."""
        return self.to != "connection" and NO_REPLY < self.code < 400

    @property
    def fault(self) -> Fault:
        """Whose fault this refusal is, by the first rule that matches."""
        # A quoted address may contain any word.
        plain = re.sub(r"<[^>]*>|\S*@\S*", "", f"{self.code} {self.text}")
        return next(rule.fault for rule in RULES if self.to in rule.at and re.search(rule.pattern, plain))


class Rule(NamedTuple):
    """Replies that have the same fault. worker/README.md has examples for each rule."""

    at: frozenset[str]
    pattern: str
    fault: Fault


_BEFORE_RCPT = frozenset({"connection", "MAIL"})
_RCPT = frozenset({"RCPT"})
_CONTENT = frozenset({"content"})
_ANY = _RCPT | _CONTENT

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

RULES = (
    Rule(_BEFORE_RCPT, r"", "outage"),
    Rule(_ANY, rf"^(?:{NO_REPLY}|{_SERVICE_NOT_AVAILABLE}) ", "passing"),
    Rule(_ANY, RECIPIENT_REFUSED, "recipient"),
    Rule(_ANY, _SENDER_CODES, "sender"),
    Rule(_ANY, _SENDER_WORDS, "sender"),
    Rule(_ANY, r"^4", "passing"),
    Rule(_RCPT, r"^5\d\d 5\.7\.1(?:\D|$)", "recipient"),
    Rule(_RCPT, r"", "sender"),
    Rule(_CONTENT, r"", "message"),
)
