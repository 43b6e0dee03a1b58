"""The outcomes that an attempt at an e-mail can have, and how each is recorded."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import ClassVar
from uuid import UUID

import msgspec

from service.operations import emails
from service.operations.emails import EmailEnd
from service.outbox.events import Reason
from service.postgres.pool import Connection
from worker.batches import Outcomes, RowLocked
from worker.mail import ledger
from worker.mail.ledger import Email
from worker.mail.session import NO_REPLY
from worker.mail.smtp import EmailRefused, MailServerUnavailable, MailThrottled
from worker.settings import WorkerSettings


class Outcome(msgspec.Struct, frozen=True):
    """How an attempt at an e-mail ended."""

    label: ClassVar[str]  # in the metrics and the log

    def describe(self) -> Mapping[str, str | int]:
        """Return the fields of a log line: never the mail server's reply, which may quote an address."""
        fields = msgspec.structs.asdict(self)
        return {"outcome": self.label} | {
            name: value for name, value in fields.items() if name in {"reason", "smtp_code"}
        }


class Sent(Outcome, frozen=True):
    """The mail server accepted the e-mail."""

    label: ClassVar = "sent"

    reply: str

    def end_of(self, email: Email) -> EmailEnd:
        """Return it as the end of *email*."""
        return EmailEnd(email.event_id, email.request.id, self.reply, traceparent=email.traceparent)


class Failed(Outcome, frozen=True):
    """The e-mail ended unsent."""

    label: ClassVar = "failed"

    reason: Reason
    reply: str
    smtp_code: int = NO_REPLY

    def end_of(self, email: Email) -> EmailEnd:
        """Return it as the end of *email*."""
        return EmailEnd(
            email.event_id, email.request.id, self.reply, self.reason, self.smtp_code, email.traceparent
        )


class RefusedForNow(Outcome, frozen=True):
    """The mail server refused the e-mail for now. An attempt is charged."""

    label: ClassVar = "postponed"

    reply: str
    smtp_code: int
    retry_seconds: float


class InternalError(Outcome, frozen=True):
    """An internal error kept the e-mail from the mail server. An attempt is charged.

    It is retried for ever, at long intervals: no mail server refused it, so no event may say that it failed.
    """

    label: ClassVar = "put_off"
    reply: ClassVar = "not given to the mail server: internal error, see the logs"

    retry_seconds: float


class NotAttempted(Outcome, frozen=True):
    """The mail server was not given the e-mail. No attempt is charged, and it is due again at once."""

    label: ClassVar = "given_back"
    retry_seconds: ClassVar = 0.0

    outage: MailServerUnavailable | None = None


class Throttled(Outcome, frozen=True):
    """The mail server limits how many e-mails it takes, and did not take this one. No attempt is charged.

    Until it is due again, this process starts no e-mail.
    """

    label: ClassVar = "throttled"
    retry_seconds: ClassVar = 1.0  # Providers limit the rate by the second.

    smtp_code: int


def after_refusal(
    refusal: EmailRefused | MailThrottled, email: Email, settings: WorkerSettings
) -> Failed | RefusedForNow | Throttled:
    """Return the outcome of a refusal.

    The e-mail is retried with doubling pauses, unless the refusal is final or the e-mail older than
    EMAIL_GIVE_UP_SECONDS. A throttled e-mail is retried for as long as it takes.
    """
    if isinstance(refusal, MailThrottled):
        return Throttled(refusal.code)
    if refusal.is_final:
        return Failed("refused", refusal.reply, refusal.code)
    age = datetime.now(UTC) - email.created_at
    if age.total_seconds() >= settings.email_give_up_seconds:
        return Failed("gave_up", refusal.reply, refusal.code)
    pause = settings.email_retry_seconds * 2 ** min(email.attempts, 20)
    return RefusedForNow(refusal.reply, refusal.code, min(settings.email_longest_retry_seconds, pause))


async def settle(connection: Connection, ends: Sequence[tuple[Email, Sent | Failed]]) -> Outcomes:
    """Record the ends of e-mails and announce them, in the caller's transaction.

    Those that were recorded before are left alone. The outcome may be RowLocked.
    """
    locked = await emails.settle_free(connection, [outcome.end_of(email) for email, outcome in ends])
    return [RowLocked() if email.event_id in locked else None for email, _ in ends]


async def put_off(
    connection: Connection,
    outcome: RefusedForNow | InternalError | NotAttempted | Throttled,
    email: Email,
    *,
    process_id: UUID,
) -> None:
    """Record that an e-mail is due again, later or at once. Raises RowLocked."""
    await ledger.put_off(
        connection,
        process_id,
        email.event_id,
        server_reply=None if isinstance(outcome, NotAttempted | Throttled) else outcome.reply,
        seconds=outcome.retry_seconds,
    )
