"""The claims of this process: taken on due e-mails, renewed, and ended by recording an outcome."""

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID, uuid4

import structlog

from service.calculation_requests.email_changes import EmailEnd, EmailId
from service.outbox.waking import RelayWaker
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool
from service.telemetry import logs
from worker import metrics
from worker.batches import LARGEST_BATCH, Batches, Failures, process_with_retries
from worker.mail import ledger
from worker.mail.ledger import Email, Outcome
from worker.mail.replies import counted_as
from worker.settings import EmailSettings

_RETRY_SECONDS = 1.0  # until the next try to record an outcome, after an internal error

_log = structlog.get_logger()


class Claims:
    """This process's claims on e-mails. Each is renewed until the outcome is recorded.

    A lock on the row would not do: it would end with the connection to Postgres, and another process would
    send the e-mail again, although this process may be about to record the mail server's acceptance. Others
    cannot know whether this process was killed, or has only lost Postgres. So they leave a claimed e-mail
    alone until its claim expires. With 4 seconds instead of 30, outages caused e-mails to be sent twice.
    """

    def __init__(self, settings: EmailSettings, pool: Pool, relay: RelayWaker) -> None:
        self._pool = pool
        self._relay = relay
        self._process_id: UUID = uuid4()
        self._claim_seconds = settings.email_claim_seconds
        self._seconds = settings.work_timeout_seconds
        self._until: dict[EmailId, float] = {}  # when each claim expires at the earliest, by our clock
        self.locked: set[EmailId] = set()  # the e-mails whose ends wait for a locked row
        self._ends = Batches(self._record_ends)

    @property
    def count(self) -> int:
        """How many e-mails this process has claimed. At most LARGEST_BATCH locked ones do not count."""
        return len(self._until) - min(len(self.locked), LARGEST_BATCH)

    def has_expired(self, email: Email) -> bool:
        """Whether the claim may have ended: it was not renewed in time, or the last renewal left it out."""
        return time.monotonic() >= self._until[email.id]

    async def claim(self, limit: int) -> tuple[list[Email], int]:
        """Claim at most *limit* due e-mails. Returns them, and how many others could not be claimed."""
        until = time.monotonic() + self._claim_seconds
        async with connections.acquired(self._pool, seconds=self._seconds) as connection:
            emails, others = await ledger.claim(
                connection,
                self._process_id,
                under_way=self._until,
                limit=limit,
                seconds=self._claim_seconds,
            )
        self._until.update((email.id, until) for email in emails)
        return emails, others

    async def renew(self) -> None:
        """Renew the claims forever."""
        while True:
            await asyncio.sleep(self._claim_seconds / 6)  # Some renewals may fail before a claim expires.
            until, emails = time.monotonic() + self._claim_seconds, list(self._until)
            with suppress(PostgresUnavailable):
                async with connections.acquired(self._pool, seconds=self._seconds) as connection:
                    renewed = await ledger.renew(
                        connection, self._process_id, emails, seconds=self._claim_seconds
                    )
                # The others are cancelled or taken over, or locked by a transaction that may do so.
                for email in self._until.keys() & emails:
                    self._until[email] = until if email in renewed else -math.inf

    async def settle(self, email: Email, outcome: Outcome) -> None:
        """Record the outcome of an attempt, which ends the claim."""
        try:
            await self._record(outcome)
        finally:
            del self._until[email.id]
            self.locked.discard(email.id)
        metrics.emails.labels(counted_as(outcome)).inc()
        # At debug level if given back, because an outage causes thousands of these lines.
        log = _log.debug if outcome.label == "given_back" else _log.info
        log(
            "email_handled",
            outcome=outcome.label,
            reason=outcome.reason if isinstance(outcome, EmailEnd) else None,
            smtp_code=outcome.smtp_code,  # not the reply, which may quote an address
            attempts=email.attempts + (outcome.label != "given_back"),
        )

    async def _record(self, outcome: Outcome) -> None:
        """Record an outcome. An end is retried until it is recorded: only this process knows the reply.

        A release is tried once. If Postgres is unavailable, or the row is locked, the claim expires instead.
        """
        while True:
            try:
                if isinstance(outcome, EmailEnd):
                    await process_with_retries(self._ends.process, outcome)
                else:
                    with suppress(PostgresUnavailable):
                        async with connections.acquired(self._pool, seconds=self._seconds) as connection:
                            await ledger.release(connection, self._process_id, outcome)
            except Exception as error:  # noqa: BLE001 - losing the outcome would send the e-mail again
                _log.error("email_recording_failed", **logs.describe(error))
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return

    async def _record_ends(self, ends: Sequence[EmailEnd]) -> Failures:
        async with connections.transaction(self._pool, seconds=self._seconds) as connection:
            failures = await ledger.record_ends(connection, ends)
        self.locked |= {end.id for end, failure in zip(ends, failures, strict=True) if failure}
        self._relay.wake()
        return failures
