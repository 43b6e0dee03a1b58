"""What a run in a cluster has shown: every create is stored once, and its customer gets one e-mail."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

_EMAILS_IN_FLIGHT = 16  # of a process with the default EMAIL_CONCURRENCY


class Create(msgspec.Struct, frozen=True):
    """A create, as callers.py prints it. Without a uuid, no try got 200."""

    key: str
    uuid: str | None
    failures: list[str] = []


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a run."""

    creates: Sequence[Create]
    stored: Mapping[str, str]  # the uuid by Idempotency-Key
    recipients: Sequence[str]  # of every e-mail
    queued: Mapping[str, int]  # the messages in each queue at the end
    undelivered: int  # events in the outbox at the end
    kills: int  # how often a process was killed, which may repeat the e-mails that it had in flight

    def breaches(self) -> Iterator[str]:
        """Yield what must not happen."""
        for create in self.creates:
            if create.uuid is None:
                yield f"{create.key} never got 200: {create.failures}"
            elif self.stored.get(create.key) != create.uuid:
                yield f"{create.key} got {create.uuid}, but {self.stored.get(create.key)} is stored"
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

    def summary(self) -> str:
        """Return the figures of the run."""
        failures = Counter(failure for create in self.creates for failure in create.failures)
        repeats = len(self.recipients) - len({*self.recipients})
        tries = ", ".join(f"{count} {name}" for name, count in failures.items()) or "none"
        return f"{len(self.creates)} creates, {repeats} e-mails repeated; tries that failed: {tries}"
