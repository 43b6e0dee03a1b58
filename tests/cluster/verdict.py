"""What a run has shown: every create is stored once, and gets its calculation and one e-mail."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

_EMAILS_IN_FLIGHT = 16  # of a process with the default EMAIL_CONCURRENCY
_LEAST = 0.8  # the share of the creates that the rate makes due


class Create(msgspec.Struct, frozen=True):
    """A create, as callers.py prints it. Without a uuid, no try got 200."""

    key: str
    uuid: str | None
    failures: list[str] = []


class Stored(msgspec.Struct, frozen=True):
    """A row of calculation_request."""

    uuid: str
    calculation_id: str | None


class Run(msgspec.Struct, kw_only=True):
    """The record of a run."""

    due: float = 1.0  # creates, by the rate and the time from the first to the end
    creates: Sequence[Create] = ()
    stored: Mapping[str, Stored] = {}  # by Idempotency-Key
    recipients: Sequence[str] = ()  # of every e-mail
    queued: Mapping[str, int] = {}  # the messages in each queue at the end
    undelivered: int = 0  # events in the outbox at the end
    kills: int = 0  # how often a process was killed, which may repeat the e-mails that it had in flight
    failed: list[str] = []  # steps of the check, with the reason

    def breaches(self) -> Iterator[str]:
        """Yield what must not happen."""
        yield from self.failed
        if len(self.creates) < self.due * _LEAST:
            yield f"{len(self.creates)} creates, but {self.due:.0f} were due"
        yield from filter(None, map(self._wrong_with, self.creates))
        emails = Counter(self.recipients)
        expected = {f"{key}@example.com" for key in self.stored}
        for recipient in sorted(expected ^ emails.keys()):
            yield f"{recipient}: {emails[recipient]} e-mails"
        repeats = emails.total() - len(emails)
        if repeats > self.kills * _EMAILS_IN_FLIGHT:
            yield f"{repeats} e-mails were repeated, after {self.kills} kills"
        for queue, messages in self.queued.items():
            if messages:
                yield f"{queue} has {messages} messages"
        if self.undelivered:
            yield f"{self.undelivered} events are in the outbox"

    def _wrong_with(self, create: Create) -> str | None:
        stored = self.stored.get(create.key)
        if create.uuid is None:
            return f"{create.key} never got 200: {create.failures}"
        if stored is None or stored.uuid != create.uuid:
            return f"{create.key} got {create.uuid}, but {stored and stored.uuid} is stored"
        if stored.calculation_id != f"calculation-of-{stored.uuid}":
            return f"{create.key} has the calculation {stored.calculation_id}"
        return None

    def summary(self) -> str:
        """Return the figures of the run."""
        failures = Counter(failure for create in self.creates for failure in create.failures)
        repeats = len(self.recipients) - len({*self.recipients})
        tries = ", ".join(f"{count} {name}" for name, count in failures.items()) or "none"
        return f"{len(self.creates)} creates, {repeats} e-mails repeated; tries that failed: {tries}"
