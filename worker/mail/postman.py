"""Sends the due e-mails of the ledger. ledger.py says what can become of an e-mail."""

import asyncio
import math
import time
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from typing import cast

import structlog
from email_validator import EmailNotValidError
from structlog.contextvars import bound_contextvars

from service.calculation_requests.request_secrets import SecretKeyRing
from service.outbox.waking import RelayWaker
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool
from service.server.background import in_background, keep_running
from service.telemetry import logs, tracing
from worker import metrics
from worker.mail import message, tokens
from worker.mail.claims import Claims
from worker.mail.ledger import Email, Outcome, Release
from worker.mail.message import Sender
from worker.mail.replies import Reply, given_back, outcome_of
from worker.mail.smtp import Mailer, MailServerUnavailable, Session
from worker.settings import EmailSettings
from worker.waiting import Pauses, wait_at_most

_LONGEST_PAUSE_SECONDS = 1.0  # after the mail server could not be reached
# After the mail server refused us. A provider might ban a client that tries a refused login often.
_LONGEST_PAUSE_AFTER_REFUSAL_SECONDS = 60.0
_POLL_SECONDS = 2.0  # for e-mails that other processes have added to the ledger
_IDLE_SECONDS = 1.0  # A connection without an e-mail for so long is closed.
_STOPPING_SHARE = 0.9  # of SHUTDOWN_SECONDS, for replies to content that was already sent
_EMAILS_PER_CONNECTION = 2  # claimed e-mails: one is sent over the connection, and one waits for it

_log = structlog.get_logger()


class Postman:
    """Sends the due e-mails of the ledger, and records the outcome of each attempt.

    The main loop claims due e-mails, which then wait in this process for a connection, and opens connections
    for them. A connection carries one e-mail after another: RCPT, content, then the outcome is recorded.

    If this process is killed, its claims expire, and another process sends the e-mails: one that the mail
    server had accepted, but whose outcome was not recorded, again with the same Message-ID.

    Independent senders were built: they needed most of this again, and were slower.
    """

    def __init__(self, settings: EmailSettings, pool: Pool, wake: asyncio.Event, relay: RelayWaker) -> None:
        self._settings = settings
        self._keys = SecretKeyRing.parse(settings.request_secret_keys)
        self._sender = Sender.parse(settings.mail_from)
        self._mailer = Mailer(settings)
        self._claims = Claims(settings, pool, relay)
        # Set if the main loop has something to do: an e-mail was added, a claim ended, or a connection was
        # opened, could not be opened, or was closed.
        self._wake = wake
        self._waiting: asyncio.Queue[Email] = asyncio.Queue()  # claimed, but not taken by a connection yet
        self._senders: set[asyncio.Task[None]] = set()  # Each opens a connection and sends over it.
        self._idle: set[asyncio.Task[None]] = set()  # the senders without an e-mail
        self._opening: set[asyncio.Task[None]] = set()  # the senders without a connection yet
        self._open = 0  # the number of open connections
        # By this machine's clock: until when connections are opened one at a time, and the end of the pause
        # after an attempt to open one failed.
        self._one_at_a_time_until = -math.inf
        self._pause_ends_at = -math.inf
        self._accepted_at = -math.inf  # when the mail server last accepted an e-mail, by this machine's clock
        self._pauses = Pauses("mail_paused")
        self._claiming_pauses = Pauses("emails_not_claimed")
        self._stop = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Send due e-mails until *stop*. Resume after every outage of the mail server or Postgres.

        After *stop* no more DATA is sent. Nearly all the time left is for replies to earlier DATA: an e-mail
        whose reply is missed is sent again.
        """
        self._stop = stop
        async with in_background("email_claims", self._claims.renew):
            try:
                await keep_running("emails", self._claim_until_stopped)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.shutdown_seconds * _STOPPING_SHARE):
                        for sender in self._idle | self._opening:
                            sender.cancel()
                        await self._give_back_waiting()
                        while self._senders:
                            await asyncio.wait(self._senders)
            finally:
                for sender in self._senders:
                    sender.cancel()
                await asyncio.gather(*self._senders, return_exceptions=True)

    async def _claim_until_stopped(self) -> None:
        """Claim due e-mails and open connections for them. Wait whenever there is nothing to do."""
        # An e-mail must not be retried much later than it is due, even if the first pause is short.
        poll_seconds = min(_POLL_SECONDS, self._settings.email_retry_seconds)
        rate = self._settings.email_rate
        while not self._stop.is_set():
            self._wake.clear()
            try:
                claimed = await self.claim_due()
            except PostgresUnavailable as outage:
                await self._claiming_pauses.log_and_wait(outage, self._stop)
                continue
            self._claiming_pauses.reset()
            self._open_connections()
            if not self._open and not self._opening:
                await self._give_back_waiting()  # A pause began during the claim.
            if not claimed:
                pause = self._pause_ends_at - time.monotonic()
                seconds = min(pause, poll_seconds) if pause > 0 else poll_seconds
                await wait_at_most(seconds, self._wake, self._stop)
            elif rate:
                await wait_at_most(claimed / rate, self._stop)

    async def claim_due(self) -> int:
        """Claim as many due e-mails as there is room for. Returns their number."""
        room = self._most_connections * _EMAILS_PER_CONNECTION - self._claims.count
        if rate := self._settings.email_rate:
            room = min(room, max(1, int(rate / 10)))  # at most what the rate allows in 0.1 s
        claimed, others = await self._claims.claim(room) if room > 0 else ([], 0)
        for email in claimed:
            self._waiting.put_nowait(email)
        if others:
            _log.warning("emails_not_claimable", emails=others)
            self._wake.set()  # More e-mails may be due.
        return len(claimed)

    @property
    def _most_connections(self) -> int:
        """How many connections may be open now, or being opened.

        During a pause none is begun. After a refusal, one at a time, until a minute after one is accepted.
        """
        now = time.monotonic()
        if now < self._pause_ends_at:
            return self._open
        most = self._settings.email_concurrency
        return min(most, self._open + 1) if now < self._one_at_a_time_until else most

    def _open_connections(self) -> None:
        """Open a connection for each waiting e-mail that no idle or opening sender will take, as allowed."""
        needed = self._waiting.qsize() - len(self._idle) - len(self._opening)
        allowed = self._most_connections - self._open - len(self._opening)
        for _ in range(min(needed, allowed)):
            sender = asyncio.create_task(self._send_over_connection())
            self._opening.add(sender)
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)

    async def _send_over_connection(self) -> None:
        """Open a connection, and send e-mails over it, one after another."""
        this = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            try:
                session = await self._mailer.open_session(self._sender.address)
            finally:
                self._opening.discard(this)  # A stop cancels only what is being opened.
        except MailServerUnavailable as outage:
            await self._pause(outage)
            return
        finally:
            self._wake.set()
        if self._one_at_a_time_until == math.inf:
            self._one_at_a_time_until = time.monotonic() + _LONGEST_PAUSE_AFTER_REFUSAL_SECONDS
        if time.monotonic() >= self._one_at_a_time_until:
            self._pauses.reset()
        self._open += 1
        try:
            while (email := await self._next_email()) is not None:
                if not await session.begin():
                    await self._settle(email, given_back(email))
                    break
                with _about(email):
                    outcome = await self._attempt(email, session)
                await self._settle(email, outcome)
                if not session.is_reusable:
                    break
        finally:
            await session.end()
            self._open -= 1
            if not self._open:
                # The mail server may have refused another connection because of those that are closed now.
                self._pause_ends_at = -math.inf
            self._wake.set()

    async def _pause(self, outage: MailServerUnavailable) -> None:
        """Open no connection for a while. Give back the e-mails that the open ones do not take at once."""
        now, code = time.monotonic(), outage.reply.code
        if code:
            self._one_at_a_time_until = math.inf
        if now >= self._pause_ends_at:  # An attempt that fails during a pause does not prolong it.
            longest = _LONGEST_PAUSE_AFTER_REFUSAL_SECONDS if code else _LONGEST_PAUSE_SECONDS
            self._pause_ends_at = now + self._pauses.log(outage, longest=longest, smtp_code=code)
        await self._give_back_waiting(outage.reply, keep=self._open)

    async def _next_email(self) -> Email | None:
        """Wait for an e-mail. Returns None to close the connection, but not at once: opening costs more."""
        if self._stop.is_set():
            return None
        sender = cast("asyncio.Task[None]", asyncio.current_task())
        self._idle.add(sender)
        try:
            async with asyncio.timeout(_IDLE_SECONDS):
                return await self._waiting.get()
        except TimeoutError:
            return None
        finally:
            self._idle.discard(sender)

    async def _give_back_waiting(self, reply: Reply | None = None, *, keep: int = 0) -> None:
        """Give back the e-mails that wait for a connection, except *keep*. Any process may send them then."""
        emails = [self._waiting.get_nowait() for _ in range(self._waiting.qsize() - keep)]
        await asyncio.gather(*(self._settle(email, given_back(email, reply)) for email in emails))

    async def _settle(self, email: Email, outcome: Outcome) -> None:
        """Record an outcome. If a row is locked for over a second, the sender goes on meanwhile."""
        with _about(email):
            recording = asyncio.create_task(self._claims.settle(email, outcome))
        self._senders.add(recording)  # so that a stop waits for it
        recording.add_done_callback(self._senders.discard)
        while not recording.done() and email.id not in self._claims.locked:
            await asyncio.wait([recording], timeout=1.0)
        self._wake.set()

    async def _attempt(self, email: Email, session: Session) -> Outcome:
        """Make one attempt to send an e-mail. Returns the outcome."""
        longest_pause = self._settings.longest_email_pause_seconds
        try:
            _, request_url = email.request.secret_and_url(self._keys, self._settings.app_url)
            token = tokens.make(email.id, self._keys, key_id=email.request.secret_key_id)
            content = message.compose(email, request_url, self._sender, token=token, date=datetime.now(UTC))
            recipient = message.in_ascii(email.request.customer_email)
            with tracing.span("send e-mail", "client", self._mailer.describe, parent=email.traceparent):
                reply = await session.name_recipient(recipient)
                if reply.is_acceptance:
                    if not self._may_send_content(email):
                        return given_back(email)
                    reply = await session.send(content)
        except EmailNotValidError:
            return email.ended("not sent: no e-mail can be composed from these addresses", "not_composable")
        except Exception as error:  # noqa: BLE001 - an internal error must not stop the other e-mails
            _log.error("email_attempt_crashed", **logs.describe(error))
            # The mail server did not refuse the e-mail, so the e-mail must not fail. It is retried forever.
            text = "not sent: internal error, see the logs"
            return Release(email.id, "internal_error", longest_pause, text)
        others_accepted = time.monotonic() < self._accepted_at + longest_pause
        if reply.is_acceptance:
            self._accepted_at = time.monotonic()
            metrics.email_delivery_seconds.observe(max(0.0, self._accepted_at - email.caused))
        return outcome_of(reply, email, self._settings, others_accepted=others_accepted)

    def _may_send_content(self, email: Email) -> bool:
        """Whether this process still has the claim on the e-mail, and is not stopping."""
        if self._claims.has_expired(email):
            _log.warning("email_claim_lost")
            return False
        return not self._stop.is_set()


def _about(email: Email) -> AbstractContextManager[None]:
    """Add to the logs of a block which e-mail they are about."""
    return bound_contextvars(email_key=email.id.key, **logs.about(email.request.uuid, email.traceparent))
