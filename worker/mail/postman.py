"""Sends the e-mails that the ledger holds."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from uuid import UUID, uuid4

import structlog
from structlog.contextvars import bound_contextvars

from service.calculation_requests import conveyancers, reading, request_secrets, storing
from service.calculation_requests.model import CalculationRequest
from service.calculation_requests.request_secrets import SecretKeyMissing, SecretKeyRing
from service.outbox.events import Reason, RequestEmailFailed, RequestEmailSent
from service.outbox.waker import RelayWaker
from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.server.background import in_background
from service.telemetry import logs, tracing
from service.telemetry.metrics import background_failures
from worker import metrics
from worker.mail import ledger, message, smtp
from worker.mail.ledger import Email
from worker.mail.message import EmailNotComposable, Sender
from worker.mail.smtp import EmailRefused, Envelope, Mailer, MailServerUnavailable
from worker.settings import WorkerSettings
from worker.waiting import Pauses, rest

_log = structlog.get_logger()

_NOT_COMPOSABLE = "the mail server was not asked: no e-mail can be made of these addresses and names"
_OWN_FAULT = "the mail server was not asked: a fault of ours, see the logs"


class ClaimLost(Exception):
    """The claim on an e-mail ran out before the mail server was given the content."""


class _Sending:
    """An e-mail that is being sent: until when the claim on it holds, by the clock of this machine."""

    task: asyncio.Task[None]

    def __init__(self, claimed_until: float) -> None:
        self.claimed_until = claimed_until
        self.content_begun = False

    def begin_content(self) -> None:
        """Note that the mail server is given the content now.

        Raises ClaimLost when another process may have taken the e-mail over: this one was paused too long.
        """
        if time.monotonic() >= self.claimed_until:
            raise ClaimLost
        self.content_begun = True


class Postman:
    """Sends the e-mails of the ledger, a few at a time, and records what the mail server said.

    An e-mail is claimed before it is sent, and the claim renewed while the mail server makes up its mind. To
    the others a process that died looks like one that lost Postgres with the mail server's answer in hand. So
    they wait until its claim has run out, which is longer than networks are usually away. A process that was
    itself paused for so long finds its claim run out, and keeps the content back.
    """

    def __init__(self, settings: WorkerSettings, pool: Pool, due: asyncio.Event, relay: RelayWaker) -> None:
        self._settings = settings
        self._relay = relay
        self._pool = pool
        self._due = due
        self._keys = SecretKeyRing.parse(settings.request_secret_keys)
        self._sender = Sender.parse(settings.mail_from)
        self._mailer = Mailer(settings)
        self._seconds = settings.work_timeout_seconds
        self._process_id: UUID = uuid4()
        self._under_way: dict[str, _Sending] = {}
        self._pauses = Pauses("mail_paused", longest_seconds=settings.longest_outage_pause_seconds)
        self._outage: Exception | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Send what is due until *stop*, through every outage of the mail server and of Postgres."""
        async with in_background("email_claims", self._renew_claims):
            try:
                while not stop.is_set():
                    await self._start_or_rest(stop)
                if tasks := [sending.task for sending in self._under_way.values()]:
                    await asyncio.wait(tasks, timeout=self._settings.finish_seconds)
            finally:
                await self._let_go()
                await self._mailer.close()

    async def _let_go(self) -> None:
        """Stop sending. What the mail server was not given is free for another process at once."""
        under_way = dict(self._under_way)
        for sending in under_way.values():
            sending.task.cancel()
        await asyncio.gather(*(sending.task for sending in under_way.values()), return_exceptions=True)
        unsent = [event_id for event_id, sending in under_way.items() if not sending.content_begun]
        if unsent:
            with suppress(PostgresUnavailable):
                async with loans.connection(self._pool, seconds=self._seconds) as connection:
                    await ledger.release(connection, self._process_id, unsent)

    async def _start_or_rest(self, stop: asyncio.Event) -> None:
        self._due.clear()
        try:
            started = await self.start_due()
        except PostgresUnavailable as error:
            await self._pauses.after(error, stop)
            return
        except Exception as error:  # noqa: BLE001 - to end here would forget the answers that are being recorded
            background_failures.labels("emails").inc()
            _log.error("emails_not_claimed", **logs.describe(error))
            await self._pauses.after(error, stop)
            return
        if self._outage is not None:
            outage, self._outage = self._outage, None
            await self._pauses.after(outage, stop)
        elif not started:
            await rest(self._settings.email_poll_seconds, self._due, stop)

    async def start_due(self) -> int:
        """Claim as many due e-mails as there is room for, and start sending them. Returns their number."""
        room = self._settings.email_concurrency - len(self._under_way)
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
        for email in claimed:
            sending = self._under_way[email.event_id] = _Sending(claimed_until)
            sending.task = asyncio.create_task(self._send(email, sending))
            sending.task.add_done_callback(partial(self._free, email.event_id))
        return len(claimed)

    def _claimed_until(self) -> float:
        """Return when a claim made now ends at the earliest: its time begins when Postgres gets it."""
        return time.monotonic() + self._settings.email_claim_seconds

    def _free(self, event_id: str, _: object) -> None:
        del self._under_way[event_id]
        self._due.set()  # There is room for another.

    async def _send(self, email: Email, sending: _Sending) -> None:
        """Send one e-mail and record what became of it."""
        with bound_contextvars(event_id=email.event_id):
            try:
                reply = await self._hand_over(email, sending)
            except EmailRefused as refusal:
                record = partial(self._record_refusal, email=email, refusal=refusal)
            except EmailNotComposable as error:
                _log.error("email_not_composable", **logs.describe(error))
                record = partial(
                    self._record_failure, email=email, reason="not_composable", reply=_NOT_COMPOSABLE
                )
            except ClaimLost:
                _log.warning("email_claim_lost")
                record = partial(self._give_back, email=email)
            except (MailServerUnavailable, PostgresUnavailable) as error:
                self._outage = error
                record = partial(self._give_back, email=email)
            except SecretKeyMissing as error:
                request_secrets.note_missing([error.key_id])
                record = partial(self._put_off, email=email)
            except Exception as error:  # noqa: BLE001 - a fault of ours must not stop the other e-mails
                _log.error("email_failed", **logs.describe(error))
                record = partial(self._put_off, email=email)
            else:
                age = datetime.now(UTC) - email.created_at
                metrics.email_delivery_seconds.observe(max(0.0, age.total_seconds()))
                self._pauses.reset()
                record = partial(self._record_acceptance, email=email, reply=reply)
            outcome = await self._keep_recording(record)
            metrics.emails.labels(outcome.partition(" (")[0].replace(" ", "_")).inc()
            _log.info("email_handled", outcome=outcome, attempts=email.attempts + 1)

    async def _hand_over(self, email: Email, sending: _Sending) -> str:
        """Return the mail server's reply on acceptance."""
        async with loans.connection(self._pool, seconds=self._seconds) as connection:
            request = await reading.read(connection, email.request_id)
            firm = await conveyancers.name_of(connection, request.conveyancer_id)
        envelope, content = self._compose(email, request, firm)
        with tracing.span("send e-mail", "client", self._mailer.describe, parent=email.traceparent):
            return await self._mailer.send(envelope, content, before_content=sending.begin_content)

    def _compose(self, email: Email, request: CalculationRequest, firm: str) -> tuple[Envelope, bytes]:
        """Return what the mail server is given. Raises EmailNotComposable, or whatever is a fault of ours."""
        compose = partial(
            message.compose,
            firm=firm,
            request_url=request.request_url(self._keys, self._settings.app_url),
            event_id=email.event_id,
            date=email.created_at,
            sender=self._sender,
        )
        try:
            content = compose(request).as_bytes()
            return Envelope(self._sender.address, message.recipient_of(request)), content
        except Exception as error:
            compose(message.with_plain_words(request)).as_bytes()  # or no e-mail at all can be made
            raise EmailNotComposable from error

    async def _keep_recording(self, record: Callable[[Connection], Awaitable[str]]) -> str:
        """Record an answer of the mail server, whatever gets in the way: it is known to nobody else."""
        pauses = Pauses("email_not_recorded", longest_seconds=self._settings.longest_outage_pause_seconds)
        never = asyncio.Event()
        while True:
            try:
                async with loans.transaction(self._pool, seconds=self._seconds) as connection:
                    outcome = await record(connection)
            except PostgresUnavailable as error:
                await pauses.after(error, never)
            except Exception as error:  # noqa: BLE001 - forgetting the answer would send the e-mail again
                _log.error("email_recording_failed", **logs.describe(error))
                await pauses.after(error, never)
            else:
                self._relay.wake()
                return outcome

    async def _record_acceptance(self, connection: Connection, *, email: Email, reply: str) -> str:
        request = await reading.lock(connection, email.request_id)
        event = RequestEmailSent(**request.event_payload(sequence=request.sequence + 1))
        await self._settle(connection, email, request, event, reply=reply)
        return "sent"

    async def _record_failure(
        self, connection: Connection, *, email: Email, reason: Reason, reply: str, code: int = smtp.NO_REPLY
    ) -> str:
        request = await reading.lock(connection, email.request_id)
        facts = request.event_payload(sequence=request.sequence + 1)
        event = RequestEmailFailed(**facts, reason=reason, smtp_code=code)
        await self._settle(connection, email, request, event, reply=reply)
        return f"failed ({code or reason})"

    async def _record_refusal(self, connection: Connection, *, email: Email, refusal: EmailRefused) -> str:
        age = (datetime.now(UTC) - email.created_at).total_seconds()
        if not refusal.is_final and age < self._settings.email_give_up_seconds:
            seconds = min(
                self._settings.email_longest_retry_seconds,
                self._settings.email_retry_seconds * 2 ** min(email.attempts, 20),
            )
            await ledger.postpone(
                connection, self._process_id, email.event_id, server_reply=refusal.reply, seconds=seconds
            )
            return f"postponed ({refusal.code})"
        reason: Reason = "refused" if refusal.is_final else "gave_up"
        return await self._record_failure(
            connection, email=email, reason=reason, reply=refusal.reply, code=refusal.code
        )

    async def _settle(
        self,
        connection: Connection,
        email: Email,
        request: CalculationRequest,
        event: RequestEmailSent | RequestEmailFailed,
        *,
        reply: str,
    ) -> None:
        """Record the end of an e-mail and announce it, unless it had ended before."""
        settled_at = storing.now()
        if await ledger.settle(connection, email.event_id, event, server_reply=reply, settled_at=settled_at):
            await storing.announce(connection, request, event, time=settled_at, traceparent=email.traceparent)

    async def _put_off(self, connection: Connection, *, email: Email) -> str:
        """Try again much later, for ever: no mail server refused this e-mail, so no event may say so."""
        seconds = self._settings.email_longest_retry_seconds
        await ledger.postpone(
            connection, self._process_id, email.event_id, server_reply=_OWN_FAULT, seconds=seconds
        )
        return "put off"

    async def _give_back(self, connection: Connection, *, email: Email) -> str:
        await ledger.release(connection, self._process_id, [email.event_id])
        return "given back"

    async def _renew_claims(self) -> None:
        """Keep the claims on what is under way, as long as this process lives."""
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
