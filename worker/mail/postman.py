"""Sends the due e-mails of the ledger."""

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from uuid import UUID, uuid4

import structlog
from email_validator import EmailNotValidError
from structlog.contextvars import bound_contextvars

from service.calculation_requests.email_changes import EmailEnd
from service.calculation_requests.request_secrets import SecretKeyRing
from service.outbox.lanes import RelayWaker
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool
from service.server.background import in_background
from service.telemetry import logs, tracing
from service.telemetry.metrics import background_failures
from worker import metrics
from worker.batches import Batches, Failures
from worker.mail import ledger, message
from worker.mail.ledger import Email, Postponement
from worker.mail.message import Sender
from worker.mail.outcomes import counted_as, outcome_of, storable
from worker.mail.smtp import Mailer, MailServerUnavailable
from worker.settings import EmailSettings
from worker.waiting import Pauses, wait_at_most

_RECORDING_PAUSE_SECONDS = 1.0  # before the next try to record an outcome, after an internal error
# After a refused greeting, login or sender. A provider might ban a client that tries a refused login often.
_LONGEST_PAUSE_SECONDS = 60.0
_POLL_SECONDS = 2.0  # for e-mails that other processes have added to the ledger
_STOPPING_SHARE = 0.9  # of SHUTDOWN_SECONDS, for replies to content that was already sent

# E-mails in flight per SMTP connection: one is sent while the outcome of another is being recorded.
_EMAILS_PER_CONNECTION = 2

_log = structlog.get_logger()


class ContentWithheld(Exception):
    """The content was not sent: the claim has expired, the process is stopping, or an outage has begun."""


class Postman:
    """Sends the due e-mails of the ledger, a few at a time, and records the mail server's replies.

    An e-mail is claimed before it is sent, and the claim is renewed until the outcome is recorded. A row lock
    would end with the connection to Postgres, and another process would send the e-mail again.

    To other processes, a killed process looks like a process that has lost Postgres but still has a reply to
    record. So they leave a claimed e-mail alone until its claim expires. EMAIL_CLAIM_SECONDS, 30 by default,
    is longer than most network outages. With 4 seconds, longer outages caused e-mails to be sent twice. A
    process that was suspended until its claim expired does not send the content.
    """

    def __init__(self, settings: EmailSettings, pool: Pool, due: asyncio.Event, relay: RelayWaker) -> None:
        self._settings = settings
        self._relay = relay
        self._pool = pool
        self._keys = SecretKeyRing.parse(settings.request_secret_keys)
        self._sender = Sender.parse(settings.mail_from)
        self._mailer = Mailer(settings)
        self._seconds = settings.work_timeout_seconds
        self._longest_pause = settings.longest_email_pause_seconds
        self._process_id: UUID = uuid4()
        self._tasks: set[asyncio.Task[None]] = set()  # one for each e-mail in flight
        self._claimed_until: dict[str, float] = {}  # for each e-mail in flight, by this machine's clock
        self._next_start = 0.0  # when EMAIL_RATE allows another e-mail, by this machine's clock
        self._due = due  # An e-mail was added to the ledger.
        self._finished = asyncio.Event()  # An e-mail has its outcome, so there is room for another.
        self._ends = Batches(self._record_batch)
        self._outage: MailServerUnavailable | None = None  # the latest since the last pause
        self._is_probing = False  # from an outage until a reply shows that it is over
        self._probe: str | None = None  # the one e-mail that is tried meanwhile
        self._connections = asyncio.Semaphore(settings.email_concurrency)
        self._accepted_at = -math.inf  # when the mail server last accepted an e-mail, by this machine's clock
        self._pauses = Pauses("mail_paused")
        self._claiming_pauses = Pauses("emails_not_claimed")
        self._stop = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Send due e-mails until *stop*. Resume after every outage of the mail server or Postgres.

        After *stop* no more content is sent. Nearly all the shutdown time is for replies to content that was
        sent before, because an e-mail whose reply is missed is sent again, once its claim has expired.
        """
        self._stop = stop
        async with in_background("email_claims", self._renew_claims):
            try:
                while not stop.is_set():
                    await self._start_or_wait(stop)
                if self._tasks:
                    await asyncio.wait(self._tasks, timeout=self._settings.shutdown_seconds * _STOPPING_SHARE)
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await self._mailer.close()

    async def _start_or_wait(self, stop: asyncio.Event) -> None:
        """Start sending due e-mails, or wait if there were none.

        In an outage, one e-mail is tried after each pause. The pauses grow: up to a second if the mail server
        is unreachable, and up to a minute if it refuses us.
        """
        self._due.clear()
        self._finished.clear()
        if self._outage is not None:
            outage, self._outage = self._outage, None
            self._is_probing, self._probe = True, None
            if code := outage.reply.code:
                await self._pauses.log_and_wait(outage, stop, longest=_LONGEST_PAUSE_SECONDS, smtp_code=code)
            else:
                await self._pauses.log_and_wait(outage, stop)
            return
        try:
            started = await self.start_due()
        except Exception as error:  # noqa: BLE001 - raising would cancel the recording of accepted e-mails
            if not isinstance(error, PostgresUnavailable):
                background_failures.labels("emails").inc()
                _log.error("emails_not_claimed", **logs.describe(error))
            await self._claiming_pauses.log_and_wait(error, stop)
            return
        self._claiming_pauses.reset()
        if not started:
            # The first retry of an e-mail must not start much later than it is due.
            seconds = min(_POLL_SECONDS, self._settings.email_retry_seconds)
            if (until_next := self._next_start - time.monotonic()) > 0:
                seconds = min(seconds, until_next)
            await wait_at_most(seconds, self._due, self._finished, stop)

    async def start_due(self) -> int:
        """Claim as many due e-mails as there is room for, and start sending them. Returns their number."""
        room = self._settings.email_concurrency * _EMAILS_PER_CONNECTION - len(self._claimed_until)
        rate = self._settings.email_rate
        if rate:
            room = min(room, max(1, int(rate / 10)))  # at most what the rate allows in 0.1 s
        if self._is_probing:
            room = min(room, 0 if self._probe in self._claimed_until else 1)
        now = time.monotonic()
        if room == 0 or now < self._next_start:
            return 0
        async with connections.Acquired(self._pool, seconds=self._seconds) as connection:
            claimed = await ledger.claim(
                connection,
                self._process_id,
                under_way=list(self._claimed_until),
                limit=room,
                seconds=self._settings.email_claim_seconds,
            )
        if rate:
            self._next_start = time.monotonic() + len(claimed) / rate
        for email in claimed:
            self._probe = email.email_key
            self._claimed_until[email.email_key] = now + self._settings.email_claim_seconds  # or a bit later
            task = asyncio.create_task(self._send(email))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return len(claimed)

    async def _send(self, email: Email) -> None:
        """Make one attempt at an e-mail, and record its outcome."""
        try:
            with bound_contextvars(
                email_key=email.email_key, **logs.about(email.request.uuid, email.traceparent)
            ):
                outcome = await self._attempt(email)
                await self._record(outcome)
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
        finally:
            del self._claimed_until[email.email_key]
            self._finished.set()

    async def _attempt(self, email: Email) -> EmailEnd | Postponement:
        """Try to send one e-mail. Returns the outcome, which is not recorded yet."""
        try:
            secret, recipient, content = self._compose(email)
            with tracing.span("send e-mail", "client", self._mailer.describe, parent=email.traceparent):
                async with self._connections:
                    self._check_no_outage(email.email_key)
                    reply = await self._mailer.send(
                        self._sender.address,
                        recipient,
                        content,
                        before_content=partial(self._check_content_may_go, email.email_key),
                    )
        except EmailNotValidError:
            return email.ended("not sent: no e-mail can be composed from these addresses", "not_composable")
        except MailServerUnavailable as outage:
            self._outage = outage
            reply = outage.reply
        except ContentWithheld:
            return Postponement(email.email_key, "given_back")
        except Exception as error:  # noqa: BLE001 - an internal error must not stop the other e-mails
            _log.error("email_attempt_crashed", **logs.describe(error))
            # No mail server refused the e-mail, so no event may say that it failed. The e-mail is retried
            # forever, at long intervals, and each attempt is counted.
            text = "not sent: internal error, see the logs"
            return Postponement(email.email_key, "internal_error", self._longest_pause, text)
        if reply.fault != "outage":
            self._is_probing = False
            self._pauses.reset()
        others_accepted = time.monotonic() < self._accepted_at + self._longest_pause
        if reply.is_acceptance:
            self._accepted_at = time.monotonic()
            age = datetime.now(UTC) - email.caused_at
            metrics.email_delivery_seconds.observe(max(0.0, age.total_seconds()))
        reply = reply._replace(text=storable(reply.text, secret))
        return outcome_of(reply, email, self._settings, others_accepted=others_accepted)

    def _compose(self, email: Email) -> tuple[str, str, bytes]:
        """Return secret, recipient and content. Raises EmailNotValidError or SecretKeyMissing."""
        secret, request_url = email.request.secret_and_url(self._keys, self._settings.app_url)
        content = message.compose(
            email.request,
            firm=email.firm,
            request_url=request_url,
            key=email.email_key,
            date=email.created_at,
            sender=self._sender,
        )
        return secret, message.in_ascii(email.request.customer_email), content

    def _check_no_outage(self, email_key: str) -> None:
        """Raise ContentWithheld if an outage has begun since this e-mail was claimed."""
        if self._outage is not None or (self._is_probing and email_key != self._probe):
            raise ContentWithheld

    def _check_content_may_go(self, email_key: str) -> None:
        """Raise ContentWithheld if this process is stopping or the e-mail's claim has expired."""
        if time.monotonic() >= self._claimed_until[email_key]:
            _log.warning("email_claim_lost")
            raise ContentWithheld
        if self._stop.is_set():
            raise ContentWithheld

    async def _record(self, outcome: EmailEnd | Postponement) -> None:
        """Record an outcome. Retry an `EmailEnd` forever, because only this process knows the reply."""
        while True:
            try:
                if isinstance(outcome, EmailEnd):
                    await self._ends.done(outcome)
                else:
                    # In an outage of Postgres a postponement is not recorded, and the claim expires.
                    with suppress(PostgresUnavailable):
                        async with connections.Acquired(self._pool, seconds=self._seconds) as connection:
                            await ledger.postpone(connection, self._process_id, outcome)
            except Exception as error:  # noqa: BLE001 - losing the outcome would send the e-mail again
                _log.error("email_recording_failed", **logs.describe(error))
                await asyncio.sleep(_RECORDING_PAUSE_SECONDS)
            else:
                return

    async def _record_batch(self, ends: Sequence[EmailEnd]) -> Failures:
        async with connections.transaction(self._pool, seconds=self._seconds) as connection:
            failures = await ledger.record_ends(connection, ends)
        self._relay.wake()
        return failures

    async def _renew_claims(self) -> None:
        """Renew the claims on in-flight e-mails for as long as this process lives."""
        seconds = self._settings.email_claim_seconds
        while True:
            await asyncio.sleep(seconds / 6)
            if not self._claimed_until:
                continue
            claimed_until = time.monotonic() + seconds
            with suppress(PostgresUnavailable):
                async with connections.Acquired(self._pool, seconds=self._seconds) as connection:
                    renewed = await ledger.renew(
                        connection, self._process_id, list(self._claimed_until), seconds=seconds
                    )
                for email_key in renewed & self._claimed_until.keys():
                    self._claimed_until[email_key] = claimed_until
