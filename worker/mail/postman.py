"""Sends the e-mails of the ledger that are due."""

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from uuid import UUID, uuid4

import structlog
from structlog.contextvars import bound_contextvars

from service.calculation_requests.request_secrets import SecretKeyMissing, SecretKeyRing
from service.operations import emails
from service.outbox.waker import RelayWaker
from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.server.background import in_background
from service.telemetry import logs, tracing
from service.telemetry.metrics import background_failures
from worker import metrics
from worker.batches import Batches, Outcomes
from worker.mail import ledger, message, outcomes
from worker.mail.allowance import Allowance
from worker.mail.ledger import Email
from worker.mail.message import EmailNotComposable, Sender
from worker.mail.outcomes import Failed, InternalError, NotAttempted, Outcome, RefusedForNow, Sent, Throttled
from worker.mail.smtp import EmailRefused, Envelope, Mailer, MailServerUnavailable, MailThrottled
from worker.settings import WorkerSettings
from worker.waiting import Pauses, wait_at_most

_NOT_COMPOSABLE = "not given to the mail server: no e-mail can be composed from these addresses and names"

# E-mails in hand for each SMTP connection: one is sent while the outcome of another is being recorded.
_EMAILS_PER_CONNECTION = 2

_log = structlog.get_logger()


class ClaimLost(Exception):
    """The claim on an e-mail expired before the mail server was given the content."""


class _Sending:
    """An e-mail that is being sent, and when the claim on it ends by the clock of this machine."""

    task: asyncio.Task[Outcome]

    def __init__(self, claimed_until: float) -> None:
        self.claimed_until = claimed_until
        self.content_begun = False

    def begin_content(self) -> None:
        """Note that the mail server is given the content now.

        Raises ClaimLost when another process may have taken the e-mail over: this one was suspended too long.
        """
        if time.monotonic() >= self.claimed_until:
            raise ClaimLost
        self.content_begun = True


class Postman:
    """Sends the due e-mails of the ledger, a few at a time, and records the mail server's replies.

    An e-mail is claimed before it is sent, and the claim renewed until its outcome is recorded. A row lock
    would end with the connection to Postgres, and another process would send the e-mail again.

    Other processes cannot distinguish a killed process from one that has lost Postgres with the mail server's
    reply in hand, so they leave its e-mails alone until the claim expires. EMAIL_CLAIM_SECONDS, 30 by
    default, is longer than most network outages: with 4, processes that were cut off for longer sent e-mails
    twice. A process that was itself suspended for so long finds its claim expired and withholds the content.
    """

    def __init__(self, settings: WorkerSettings, pool: Pool, due: asyncio.Event, relay: RelayWaker) -> None:
        self._settings = settings
        self._relay = relay
        self._pool = pool
        self._keys = SecretKeyRing.parse(settings.request_secret_keys)
        self._sender = Sender.parse(settings.mail_from)
        self._mailer = Mailer(settings)
        self._allowance = Allowance(settings.email_rate)
        self._seconds = settings.work_timeout_seconds
        self._process_id: UUID = uuid4()
        self._under_way: dict[str, _Sending] = {}  # by event id
        self._due = due  # An e-mail was added to the ledger.
        self._finished = asyncio.Event()  # An e-mail under way has its outcome: there is room for another.
        self._ends = Batches(self._settle)
        self._connections = asyncio.Semaphore(settings.email_concurrency)
        self._pauses = Pauses("mail_paused", longest_seconds=settings.longest_outage_pause_seconds)

    async def run(self, stop: asyncio.Event) -> None:
        """Send what is due until *stop*, through every outage of the mail server and of Postgres."""
        async with (
            in_background("email_claims", self._renew_claims),
            in_background("email_settlements", self._ends.run),
        ):
            try:
                while not stop.is_set():
                    await self._start_or_wait(stop)
                if tasks := [sending.task for sending in self._under_way.values()]:
                    await asyncio.wait(tasks, timeout=self._settings.finish_seconds)
            finally:
                await self._abandon_sending()
                await self._mailer.close()

    async def _abandon_sending(self) -> None:
        """Stop sending. E-mails that the mail server was not given are due again at once."""
        unfinished = {
            event_id: sending for event_id, sending in self._under_way.items() if not sending.task.done()
        }
        for sending in unfinished.values():
            sending.task.cancel()
        await asyncio.gather(*(sending.task for sending in unfinished.values()), return_exceptions=True)
        unsent = [event_id for event_id, sending in unfinished.items() if not sending.content_begun]
        if unsent:
            with suppress(PostgresUnavailable):
                async with loans.connection(self._pool, seconds=self._seconds) as connection:
                    await ledger.release(connection, self._process_id, unsent)

    async def _start_or_wait(self, stop: asyncio.Event) -> None:
        """Start what is due. Then pause if there is an outage, or wait for more if nothing was due."""
        self._due.clear()
        self._finished.clear()
        try:
            outage = self._forget_finished()
            started = await self.start_due()
        except PostgresUnavailable as error:
            await self._pauses.log_and_wait(error, stop)
            return
        except Exception as error:  # noqa: BLE001 - raising would cancel the recording of accepted e-mails
            background_failures.labels("emails").inc()
            _log.error("emails_not_claimed", **logs.describe(error))
            await self._pauses.log_and_wait(error, stop)
            return
        if outage is not None:
            await self._pauses.log_and_wait(outage, stop, smtp_code=outage.code)
        elif not started:
            seconds = min(self._settings.email_poll_seconds, self._allowance.wait_seconds or math.inf)
            await wait_at_most(seconds, self._due, self._finished, stop)

    def _forget_finished(self) -> MailServerUnavailable | None:
        """Make room for other e-mails. Returns an outage that one of the finished ones met, if any."""
        outage = None
        for event_id, sending in list(self._under_way.items()):
            if sending.task.done():
                del self._under_way[event_id]
                match sending.task.result():
                    case Sent():
                        self._pauses.reset()
                    case Throttled():
                        self._allowance.pause(Throttled.retry_seconds)
                    case NotAttempted(outage=MailServerUnavailable() as error):
                        outage = error
        return outage

    async def start_due(self) -> int:
        """Claim as many due e-mails as there is room for, and start sending them. Returns their number."""
        most = self._settings.email_concurrency * _EMAILS_PER_CONNECTION
        room = self._allowance.at_most(most - len(self._under_way))
        if room == 0:
            return 0
        claimed_until = self._claimed_until()
        async with loans.connection(self._pool, seconds=self._seconds) as connection:
            claimed = await ledger.claim(
                connection,
                self._process_id,
                under_way=list(self._under_way),
                limit=room,
                seconds=self._settings.email_claim_seconds,
            )
        self._allowance.use(len(claimed))
        for email in claimed:
            sending = self._under_way[email.event_id] = _Sending(claimed_until)
            sending.task = asyncio.create_task(self._send(email, sending))
            sending.task.add_done_callback(lambda _: self._finished.set())
        return len(claimed)

    def _claimed_until(self) -> float:
        """Return the earliest end of a claim made now: its time begins once Postgres has the statement."""
        return time.monotonic() + self._settings.email_claim_seconds

    async def _send(self, email: Email, sending: _Sending) -> Outcome:
        """Make one attempt at an e-mail, and record its outcome."""
        story = logs.about(email.request.uuid, email.traceparent)
        with bound_contextvars(event_id=email.event_id, **story):
            outcome = await self._attempt(email, sending)
            await self._keep_recording(outcome, email)
            metrics.emails.labels(outcome.label).inc()
            _log.info("email_handled", attempts=email.attempts + 1, **outcome.describe())
            return outcome

    async def _attempt(self, email: Email, sending: _Sending) -> Outcome:
        """Give one e-mail to the mail server. Returns the outcome, which is not recorded yet."""
        try:
            async with self._connections:
                reply = await self._hand_over(email, sending)
        except (EmailRefused, MailThrottled) as refusal:
            return outcomes.after_refusal(refusal, email, self._settings)
        except EmailNotComposable as error:
            _log.error("email_not_composable", **logs.describe(error))
            return Failed("not_composable", _NOT_COMPOSABLE)
        except ClaimLost:
            _log.warning("email_claim_lost")
            return NotAttempted()
        except MailServerUnavailable as error:
            return NotAttempted(error)
        except SecretKeyMissing as error:
            self._keys.report_missing(error)
        except Exception as error:  # noqa: BLE001 - an internal error must not stop the other e-mails
            _log.error("email_failed", **logs.describe(error))
        else:
            age = datetime.now(UTC) - email.created_at
            metrics.email_delivery_seconds.observe(max(0.0, age.total_seconds()))
            return Sent(reply)
        return InternalError(self._settings.email_longest_retry_seconds)

    async def _hand_over(self, email: Email, sending: _Sending) -> str:
        """Return the mail server's reply on acceptance."""
        envelope, content = self._compose(email)
        with tracing.span("send e-mail", "client", self._mailer.describe, parent=email.traceparent):
            return await self._mailer.send(envelope, content, before_content=sending.begin_content)

    def _compose(self, email: Email) -> tuple[Envelope, bytes]:
        """Return the envelope and the content. Raises EmailNotComposable when the request is at fault."""
        compose = partial(
            message.compose,
            firm=email.firm,
            request_url=email.request.request_url(self._keys, self._settings.app_url),
            event_id=email.event_id,
            date=email.created_at,
            sender=self._sender,
        )
        try:
            content = compose(email.request)
            return Envelope(self._sender.address, message.recipient_of(email.request)), content
        except Exception as error:
            # If plain words fail too, so would every e-mail: an internal error, not a fault of this request.
            compose(message.with_plain_words(email.request))
            raise EmailNotComposable from error

    async def _keep_recording(self, outcome: Outcome, email: Email) -> None:
        """Record an outcome, however often that fails: only this process knows the mail server's reply."""
        pauses = Pauses("email_not_recorded", longest_seconds=self._settings.longest_outage_pause_seconds)
        never = asyncio.Event()
        while True:
            try:
                await self._record(outcome, email)
            except PostgresUnavailable as error:
                await pauses.log_and_wait(error, never)
            except Exception as error:  # noqa: BLE001 - losing the outcome would send the e-mail again
                _log.error("email_recording_failed", **logs.describe(error))
                await pauses.log_and_wait(error, never)
            else:
                return

    async def _record(self, outcome: Outcome, email: Email) -> None:
        match outcome:
            case Sent() | Failed():
                await self._ends.done((email, outcome))
            case RefusedForNow() | InternalError() | NotAttempted() | Throttled():
                async with loans.connection(self._pool, seconds=self._seconds) as connection:
                    await outcomes.put_off(connection, outcome, email, process_id=self._process_id)

    async def _settle(self, ends: Sequence[tuple[Email, Sent | Failed]]) -> Outcomes:
        async with loans.transaction(self._pool, seconds=self._seconds) as connection:
            await emails.settle(connection, [outcome.end_of(email) for email, outcome in ends])
        self._relay.wake()
        return [None] * len(ends)

    async def _renew_claims(self) -> None:
        """Renew the claims on what is under way, as long as this process lives."""
        while True:
            await asyncio.sleep(self._settings.email_claim_seconds / 6)
            if self._under_way:
                with suppress(PostgresUnavailable):
                    async with loans.connection(self._pool, seconds=self._seconds) as connection:
                        await self._renew(connection)

    async def _renew(self, connection: Connection) -> None:
        under_way = dict(self._under_way)
        claimed_until = self._claimed_until()
        renewed = await ledger.renew(
            connection, self._process_id, list(under_way), seconds=self._settings.email_claim_seconds
        )
        for event_id, sending in under_way.items():
            sending.claimed_until = claimed_until if event_id in renewed else -math.inf
