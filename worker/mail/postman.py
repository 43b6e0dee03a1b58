"""Sends the e-mails of the ledger that are due."""

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from uuid import UUID, uuid4

import msgspec
import structlog
from structlog.contextvars import bound_contextvars

from service.calculation_requests.request_secrets import SecretKeyMissing, SecretKeyRing
from service.operations.emails import EmailEnd
from service.outbox.waker import RelayWaker
from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.server.background import in_background
from service.telemetry import logs, tracing
from service.telemetry.metrics import background_failures
from worker import metrics
from worker.batches import Batches, Outcomes, RowLocked
from worker.mail import ledger, message, outcomes
from worker.mail.allowance import Allowance
from worker.mail.ledger import Email, PutOff
from worker.mail.message import Sender
from worker.mail.smtp import Mailer, MailServerUnavailable
from worker.settings import WorkerSettings
from worker.waiting import Pauses, wait_at_most

_NOT_COMPOSABLE = "not given to the mail server: no e-mail can be composed from these addresses and names"

_RECORDING_PAUSE_SECONDS = 1.0  # before the outcome of an e-mail is recorded again, after an internal error
_POLL_SECONDS = 2.0  # for e-mails that other processes have added to the ledger

# E-mails in hand for each SMTP connection: one is sent while the outcome of another is being recorded.
_EMAILS_PER_CONNECTION = 2

_LOGGED = {"reason", "smtp_code"}  # never the mail server's reply, which may quote an address

_log = structlog.get_logger()


class ClaimLost(Exception):
    """The claim on an e-mail expired before the mail server was given the content."""


class _Sending:
    """An e-mail that is being sent, and when the claim on it ends by the clock of this machine."""

    task: asyncio.Task[None]

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
        self._records = Batches(self._record)
        self._outage: MailServerUnavailable | None = None  # met since e-mails were last claimed
        self._connections = asyncio.Semaphore(settings.email_concurrency)
        self._pauses = Pauses("mail_paused")

    async def run(self, stop: asyncio.Event) -> None:
        """Send what is due until *stop*, through every outage of the mail server and of Postgres."""
        async with in_background("email_claims", self._renew_claims):
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
        unfinished = dict(self._under_way)
        for sending in unfinished.values():
            sending.task.cancel()
        await asyncio.gather(*(sending.task for sending in unfinished.values()), return_exceptions=True)
        unsent = [key for key, sending in unfinished.items() if not sending.content_begun]
        if unsent:
            with suppress(PostgresUnavailable):
                await self._record([PutOff(key, "given_back") for key in unsent])

    async def _start_or_wait(self, stop: asyncio.Event) -> None:
        """Start what is due. Then pause if there is an outage, or wait for more if nothing was due."""
        self._due.clear()
        self._finished.clear()
        outage, self._outage = self._outage, None
        try:
            started = await self.start_due()
        except Exception as error:  # noqa: BLE001 - raising would cancel the recording of accepted e-mails
            if not isinstance(error, PostgresUnavailable):
                background_failures.labels("emails").inc()
                _log.error("emails_not_claimed", **logs.describe(error))
            await self._pauses.log_and_wait(error, stop)
            return
        if outage is not None:
            await self._pauses.log_and_wait(outage, stop, smtp_code=outage.code)
        elif not started:
            # A first retry must not come much later than it is due.
            longest = min(_POLL_SECONDS, self._settings.email_retry_seconds)
            seconds = min(longest, self._allowance.wait_seconds or longest)
            await wait_at_most(seconds, self._due, self._finished, stop)

    async def start_due(self) -> int:
        """Claim as many due e-mails as there is room for, and start sending them. Returns their number."""
        most = self._settings.email_concurrency * _EMAILS_PER_CONNECTION
        room = self._allowance.at_most(most - len(self._under_way))
        if room == 0:
            return 0
        claimed_until = time.monotonic() + self._settings.email_claim_seconds  # at the earliest
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
            sending.task.add_done_callback(partial(self._make_room, email.event_id))
        return len(claimed)

    def _make_room(self, event_id: str, _: object) -> None:
        del self._under_way[event_id]
        self._finished.set()

    async def _send(self, email: Email, sending: _Sending) -> None:
        """Make one attempt at an e-mail, and record its outcome."""
        story = logs.about(email.request.uuid, email.traceparent)
        with bound_contextvars(event_id=email.event_id, **story):
            outcome = await self._attempt(email, sending)
            await self._keep_recording(outcome)
            metrics.emails.labels(outcome.label).inc()
            facts = msgspec.structs.asdict(outcome)
            known = {name: value for name, value in facts.items() if name in _LOGGED and value}
            _log.info("email_handled", outcome=outcome.label, attempts=email.attempts + 1, **known)

    async def _attempt(self, email: Email, sending: _Sending) -> EmailEnd | PutOff:
        """Give one e-mail to the mail server. Returns the outcome, which is not recorded yet."""
        try:
            composed = self._compose(email)
            if composed is None:
                return email.ended(_NOT_COMPOSABLE, "not_composable")
            with tracing.span("send e-mail", "client", self._mailer.describe, parent=email.traceparent):
                async with self._connections:
                    reply = await self._mailer.send(*composed, before_content=sending.begin_content)
        except MailServerUnavailable as outage:
            self._outage = outage
            return PutOff(email.event_id, "given_back")
        except ClaimLost:
            _log.warning("email_claim_lost")
            return PutOff(email.event_id, "given_back")
        except SecretKeyMissing as error:
            self._keys.report_missing(error)
            return outcomes.internal_error(email, self._settings)
        except Exception as error:  # noqa: BLE001 - an internal error must not stop the other e-mails
            _log.error("email_failed", **logs.describe(error))
            return outcomes.internal_error(email, self._settings)
        outcome = outcomes.of_reply(reply, email, self._settings)
        if outcome.label == "sent":
            age = datetime.now(UTC) - email.created_at
            metrics.email_delivery_seconds.observe(max(0.0, age.total_seconds()))
            self._pauses.reset()
        elif outcome.label == "throttled":
            self._allowance.pause(outcomes.THROTTLED_SECONDS)
        return outcome

    def _compose(self, email: Email) -> tuple[str, str, bytes] | None:
        """Return sender, recipient and content, or None if the request is at fault."""
        compose = partial(
            message.compose,
            firm=email.firm,
            request_url=email.request.request_url(self._keys, self._settings.app_url),
            event_id=email.event_id,
            date=email.created_at,
            sender=self._sender,
        )
        try:
            return self._sender.address, message.recipient_of(email.request), compose(email.request)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with its words
            # If plain words fail too, so would every e-mail: an internal error, not a fault of this request.
            compose(message.with_plain_words(email.request))
            _log.error("email_not_composable", **logs.describe(error))
            return None

    async def _keep_recording(self, outcome: EmailEnd | PutOff) -> None:
        """Record an outcome, however often that fails: only this process knows the mail server's reply."""
        while True:
            try:
                return await self._records.done(outcome)
            except Exception as error:  # noqa: BLE001 - losing the outcome would send the e-mail again
                _log.error("email_recording_failed", **logs.describe(error))
                await asyncio.sleep(_RECORDING_PAUSE_SECONDS)

    async def _record(self, done: Sequence[EmailEnd | PutOff]) -> Outcomes:
        async with loans.transaction(self._pool, seconds=self._seconds) as connection:
            locked = await ledger.record(connection, self._process_id, done)
        if any(isinstance(each, EmailEnd) for each in done):
            self._relay.wake()
        return [RowLocked() if each.key in locked else None for each in done]

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
        seconds = self._settings.email_claim_seconds
        claimed_until = time.monotonic() + seconds
        renewed = await ledger.renew(connection, self._process_id, list(under_way), seconds=seconds)
        for event_id, sending in under_way.items():
            sending.claimed_until = claimed_until if event_id in renewed else -math.inf
