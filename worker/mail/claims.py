"""The e-mails that this process has in flight: claimed, kept, and settled by an outcome."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID, uuid4

import structlog

from service.calculation_requests.email_changes import EmailEnd
from service.outbox.lanes import RelayWaker
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool
from service.telemetry import logs
from worker import metrics
from worker.batches import Batches, Failures
from worker.mail import ledger
from worker.mail.ledger import Email, Postponement
from worker.mail.outcomes import counted_as
from worker.settings import EmailSettings

_RECORDING_PAUSE_SECONDS = 1.0  # before the next try to record an outcome, after an internal error

_log = structlog.get_logger()


class Claims:
    """This process's claims on e-mails. Each is renewed until the outcome is recorded.

    A row lock would end with the connection to Postgres, and another process would send the e-mail again.

    To other processes, a killed process looks like a process that has lost Postgres but still has a reply to
    record. So they leave a claimed e-mail alone until its claim expires. EMAIL_CLAIM_SECONDS, 30 by default,
    is longer than most network outages. With 4 seconds, longer outages caused e-mails to be sent twice.
    """

    def __init__(self, settings: EmailSettings, pool: Pool, relay: RelayWaker) -> None:
        self._pool = pool
        self._relay = relay
        self._process_id: UUID = uuid4()
        self._claim_seconds = settings.email_claim_seconds
        self._seconds = settings.work_timeout_seconds
        self._until: dict[str, float] = {}  # for each e-mail in flight, by this machine's clock
        self._ends = Batches(self._record_ends)

    def __len__(self) -> int:
        return len(self._until)

    def has_expired(self, email: Email) -> bool:
        """Whether another process may have claimed the e-mail, as after this process was suspended."""
        return time.monotonic() >= self._until[email.email_key]

    async def claim(self, limit: int) -> list[Email]:
        """Claim at most *limit* due e-mails."""
        until = time.monotonic() + self._claim_seconds  # or a bit later
        async with connections.acquired(self._pool, seconds=self._seconds) as connection:
            emails = await ledger.claim(
                connection,
                self._process_id,
                under_way=list(self._until),
                limit=limit,
                seconds=self._claim_seconds,
            )
        self._until.update((email.email_key, until) for email in emails)
        return emails

    async def renew(self) -> None:
        """Renew the claims for as long as this process lives."""
        while True:
            await asyncio.sleep(self._claim_seconds / 6)
            if not self._until:
                continue
            until = time.monotonic() + self._claim_seconds
            with suppress(PostgresUnavailable):
                async with connections.acquired(self._pool, seconds=self._seconds) as connection:
                    renewed = await ledger.renew(
                        connection, self._process_id, list(self._until), seconds=self._claim_seconds
                    )
                self._until.update(dict.fromkeys(renewed & self._until.keys(), until))

    async def settle(self, email: Email, outcome: EmailEnd | Postponement) -> None:
        """Record the outcome of an attempt, which ends the claim."""
        try:
            await self._record(outcome)
        finally:
            del self._until[email.email_key]
        metrics.emails.labels(counted_as(outcome)).inc()
        # In an outage thousands of e-mails are `given_back`. `mail_paused` reports the outage.
        log = _log.debug if outcome.label == "given_back" else _log.info
        log(
            "email_handled",
            outcome=outcome.label,
            reason=outcome.reason if isinstance(outcome, EmailEnd) else None,
            smtp_code=outcome.smtp_code,  # not the reply, which may quote an address
            attempts=email.attempts + 1,
        )

    async def _record(self, outcome: EmailEnd | Postponement) -> None:
        """Record an outcome. Retry an `EmailEnd` forever, because only this process knows the reply."""
        while True:
            try:
                if isinstance(outcome, EmailEnd):
                    await self._ends.process(outcome)
                else:
                    # In an outage of Postgres a postponement is not recorded, and the claim expires.
                    with suppress(PostgresUnavailable):
                        async with connections.acquired(self._pool, seconds=self._seconds) as connection:
                            await ledger.postpone(connection, self._process_id, outcome)
            except Exception as error:  # noqa: BLE001 - losing the outcome would send the e-mail again
                _log.error("email_recording_failed", **logs.describe(error))
                await asyncio.sleep(_RECORDING_PAUSE_SECONDS)
            else:
                return

    async def _record_ends(self, ends: Sequence[EmailEnd]) -> Failures:
        async with connections.transaction(self._pool, seconds=self._seconds) as connection:
            failures = await ledger.record_ends(connection, ends)
        self._relay.wake()
        return failures
