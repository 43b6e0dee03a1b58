"""Sends the due e-mails of the ledger."""

import asyncio
import math
import time
from collections.abc import Coroutine
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from typing import Any

import structlog
from email_validator import EmailNotValidError
from structlog.contextvars import bound_contextvars

from service.calculation_requests.email_changes import EmailEnd
from service.calculation_requests.request_secrets import SecretKeyRing
from service.outbox.lanes import RelayWaker
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool
from service.server.background import in_background, keep_running
from service.telemetry import logs, tracing
from worker import metrics
from worker.mail import message
from worker.mail.claims import Claims
from worker.mail.ledger import Email, Postponement
from worker.mail.message import Sender
from worker.mail.outcomes import give_back, outcome_of, storable
from worker.mail.replies import Reply
from worker.mail.smtp import Mailer, MailServerUnavailable, Session
from worker.settings import EmailSettings
from worker.waiting import Pauses, wait_at_most

# Pauses after a connection that could not be opened, or a greeting, login or sender that was refused. A
# provider might ban a client that tries a refused login often.
_LONGEST_PAUSE_SECONDS, _LONGEST_PAUSE_AFTER_REFUSAL_SECONDS = 1.0, 60.0
_POLL_SECONDS = 2.0  # for e-mails that other processes have added to the ledger
_IDLE_SECONDS = 1.0  # Then a connection is closed.
_STOPPING_SHARE = 0.9  # of SHUTDOWN_SECONDS, for replies to content that was already sent

# E-mails in flight per SMTP connection: one is sent while the outcome of another is being recorded.
_EMAILS_PER_CONNECTION = 2

_log = structlog.get_logger()


class Postman:
    """Sends the due e-mails of the ledger, and records the mail server's replies.

    The main loop claims e-mails and opens connections for them. Each connection carries one e-mail after
    another while any wait. Outcomes are recorded meanwhile.
    """

    def __init__(self, settings: EmailSettings, pool: Pool, due: asyncio.Event, relay: RelayWaker) -> None:
        self._settings = settings
        self._keys = SecretKeyRing.parse(settings.request_secret_keys)
        self._sender = Sender.parse(settings.mail_from)
        self._mailer = Mailer(settings)
        self._claims = Claims(settings, pool, relay)
        # Claimed e-mails that wait for a connection. None ends a connection.
        self._waiting: asyncio.Queue[Email | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()  # one per connection, and one per outcome to record
        self._opening = 0  # connections that are being opened, or pause because they could not be
        self._open = 0
        self._idle = 0  # open connections that wait for an e-mail
        self._is_refused = False  # Whether the latest connection could not be opened.
        self._is_pausing = False
        self._due = due  # An e-mail was added to the ledger.
        self._changed = asyncio.Event()  # There may be room for another e-mail or connection.
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
        async with in_background("email_claims", self._claims.renew):
            try:
                await keep_running("emails", self._start_until_stopped)
                self._give_back_waiting()
                for _ in range(self._open + self._opening):
                    self._waiting.put_nowait(None)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.shutdown_seconds * _STOPPING_SHARE):
                        while self._tasks:
                            await asyncio.wait(self._tasks)
                            self._give_back_waiting()  # e-mails whose connection ended before RCPT
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _start_until_stopped(self) -> None:
        """Claim due e-mails and open connections for them. Wait whenever there is nothing to do."""
        # The first retry of an e-mail must not start much later than it is due.
        poll_seconds = min(_POLL_SECONDS, self._settings.email_retry_seconds)
        rate = self._settings.email_rate
        while not self._stop.is_set():
            self._due.clear()
            self._changed.clear()
            try:
                claimed = await self.claim_due()
            except PostgresUnavailable as outage:
                await self._claiming_pauses.log_and_wait(outage, self._stop)
                continue
            self._claiming_pauses.reset()
            self._open_connections()
            if not claimed:
                await wait_at_most(poll_seconds, self._due, self._changed, self._stop)
            elif rate:
                await wait_at_most(claimed / rate, self._stop)

    async def claim_due(self) -> int:
        """Claim as many due e-mails as there is room for. Returns their number."""
        room = self._settings.email_concurrency * _EMAILS_PER_CONNECTION - len(self._claims)
        if rate := self._settings.email_rate:
            room = min(room, max(1, int(rate / 10)))  # at most what the rate allows in 0.1 s
        if not self._open:
            room = min(room, self._openable())
        claimed = await self._claims.claim(room) if room > 0 else []
        for email in claimed:
            self._waiting.put_nowait(email)
        return len(claimed)

    def _openable(self) -> int:
        """Return how many connections may be opened now. After a refusal, one is tried after each pause."""
        free = self._settings.email_concurrency - self._open - self._opening
        return min(free, 1 - self._opening) if self._is_refused else free

    def _open_connections(self) -> None:
        """Open a connection for each e-mail that none takes otherwise."""
        untaken = self._waiting.qsize() - self._idle - self._opening
        for _ in range(min(self._openable(), untaken)):
            self._opening += 1
            self._start(self._send_over_connection())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_over_connection(self) -> None:
        """Open a connection, and send e-mails over it, one after another."""
        try:
            session = await self._mailer.open_session(self._sender.address)
        except MailServerUnavailable as outage:
            await self._pause(outage)
            return
        finally:
            self._opening -= 1
            self._changed.set()
        self._open += 1
        if not self._is_pausing:
            self._is_refused = False
            self._pauses.reset()
        try:
            while (email := await self._next_email()) is not None:
                if not await session.is_ready():
                    self._waiting.put_nowait(email)
                    break
                await self._send(email, session)
        finally:
            await session.end()
            self._open -= 1
            self._changed.set()

    async def _next_email(self) -> Email | None:
        """Wait for an e-mail, but not long. With TLS, a connection for each costs more than all the rest."""
        self._idle += 1
        try:
            return await asyncio.wait_for(self._waiting.get(), _IDLE_SECONDS)
        except TimeoutError:
            return None
        finally:
            self._idle -= 1

    async def _pause(self, outage: MailServerUnavailable) -> None:
        """Pause, longer each time. If no connection is open, give back the e-mails that wait for one."""
        self._is_refused = True
        if not self._open:
            self._give_back_waiting(outage.reply)
        if self._is_pausing:  # Connections that fail together cause one pause.
            return
        self._is_pausing = True
        code = outage.reply.code
        longest = _LONGEST_PAUSE_AFTER_REFUSAL_SECONDS if code else _LONGEST_PAUSE_SECONDS
        await self._pauses.log_and_wait(outage, self._stop, longest=longest, smtp_code=code)
        self._is_pausing = False

    def _give_back_waiting(self, outage: Reply | None = None) -> None:
        """Give back the e-mails that wait for a connection, so that any process may try them."""
        while not self._waiting.empty():
            if (email := self._waiting.get_nowait()) is not None:
                with _about(email):
                    self._start(self._settle(email, give_back(email, outage)))

    async def _settle(self, email: Email, outcome: EmailEnd | Postponement) -> None:
        await self._claims.settle(email, outcome)
        self._changed.set()

    async def _send(self, email: Email, session: Session) -> None:
        """Make one attempt at an e-mail. Its outcome is recorded while the next e-mail is sent."""
        with _about(email):
            self._start(self._settle(email, await self._attempt(email, session)))

    async def _attempt(self, email: Email, session: Session) -> EmailEnd | Postponement:
        """Try to send one e-mail. Returns the outcome, which is not recorded yet."""
        longest_pause = self._settings.longest_email_pause_seconds
        try:
            secret, recipient, content = self._compose(email)
            with tracing.span("send e-mail", "client", self._mailer.describe, parent=email.traceparent):
                reply = await session.name_recipient(recipient)
                if reply.is_acceptance:
                    if not self._may_send_content(email):
                        return give_back(email)
                    reply = await session.send(content)
        except EmailNotValidError:
            return email.ended("not sent: no e-mail can be composed from these addresses", "not_composable")
        except Exception as error:  # noqa: BLE001 - an internal error must not stop the other e-mails
            _log.error("email_attempt_crashed", **logs.describe(error))
            # No mail server refused the e-mail, so no event may say that it failed. The e-mail is retried
            # forever, at long intervals, and each attempt is counted.
            text = "not sent: internal error, see the logs"
            return Postponement(email.email_key, "internal_error", longest_pause, text)
        others_accepted = time.monotonic() < self._accepted_at + longest_pause
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

    def _may_send_content(self, email: Email) -> bool:
        """Whether the e-mail is still this process's to send, and the process is not stopping."""
        if self._claims.has_expired(email):
            _log.warning("email_claim_lost")
            return False
        return not self._stop.is_set()


def _about(email: Email) -> AbstractContextManager[None]:
    """Add to the logs of a block which e-mail they are about."""
    return bound_contextvars(email_key=email.email_key, **logs.about(email.request.uuid, email.traceparent))
