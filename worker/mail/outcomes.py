"""The outcome of an attempt at an e-mail: it ends, which is announced, or it is put off."""

from datetime import UTC, datetime

from service.operations.emails import EmailEnd
from worker.mail.ledger import Email, PutOff
from worker.mail.session import NO_REPLY, Reply
from worker.settings import WorkerSettings

_LONGEST_RETRY = 60  # times the first one: half an hour by default
THROTTLED_SECONDS = 1.0  # Providers limit the rate by the second.
_LONGEST_REPLY = 1000
_INTERNAL_ERROR = "not given to the mail server: internal error, see the logs"


def of_reply(reply: Reply, email: Email, settings: WorkerSettings) -> EmailEnd | PutOff:
    """Return the outcome of a mail server's reply (RFC 5321, section 4.2.1).

    A refused e-mail is retried with doubling pauses, unless the refusal is final or the e-mail older than
    EMAIL_GIVE_UP_SECONDS. A throttled one is retried for as long as it takes. If the connection was lost when
    the content had been sent, the server may have accepted it: an attempt is charged.
    """
    if reply.is_acceptance:
        return email.ended(_storable(reply.text))
    if reply.is_throttling:
        return PutOff(email.event_id, "throttled", THROTTLED_SECONDS, smtp_code=reply.code)
    words = _words(reply)
    if reply.code >= 500:
        return email.ended(words, "refused", reply.code)
    age = datetime.now(UTC) - email.created_at
    if age.total_seconds() >= settings.email_give_up_seconds:
        return email.ended(words, "gave_up", reply.code)
    pause = settings.email_retry_seconds * min(2**email.attempts, _LONGEST_RETRY)
    return PutOff(email.event_id, "postponed", pause, words, reply.code)


def internal_error(email: Email, settings: WorkerSettings) -> PutOff:
    """Return the outcome of an internal error, which charges an attempt.

    It is retried for ever, at long intervals: no mail server refused it, so no event may say that it failed.
    """
    pause = settings.email_retry_seconds * _LONGEST_RETRY
    return PutOff(
        email.event_id, "put_off", pause, "not given to the mail server: internal error, see the logs"
    )


def _words(reply: Reply) -> str:
    if reply.code != NO_REPLY:
        return _storable(f"{reply.code} {reply.text}")
    if reply.to == "content":
        return "no reply to the content; it may have been accepted"
    return "the mail server ended the session before the content"


def _storable(reply: str) -> str:
    """Return a reply as text that Postgres accepts: a mail server may use any encoding, and NULs."""
    text = reply.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")[:_LONGEST_REPLY]
