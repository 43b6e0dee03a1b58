"""Sends e-mails to a mail server without a ledger, and returns the outcome of each."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from service.calculation_requests.email_changes import EmailId
from tests.harness.processes import email_settings
from tests.worker.mail.composing import A_STORED_REQUEST, SENDER, compose
from worker.mail import replies
from worker.mail.ledger import Email, Outcome
from worker.mail.replies import Reply
from worker.mail.smtp import Mailer, MailServerUnavailable, Session
from worker.settings import EmailSettings


class Sending:
    """Sends e-mails over one connection for as long as possible, as the postman does."""

    def __init__(self, settings: EmailSettings) -> None:
        self._mailer = Mailer(settings)
        self._session: Session | None = None

    async def send(self, content: bytes | None = None) -> Outcome:
        try:
            if self._session is None:
                self._session = await self._mailer.open_session(SENDER.address)
        except MailServerUnavailable as outage:
            return replies.given_back(an_email(), outage.reply)
        if not await self._session.begin():
            await self.end()
            return replies.given_back(an_email())
        reply = await self._session.name_recipient("ada@customer.example.com")
        if reply.is_acceptance:
            reply = await self._session.send(content or compose())
        if not self._session.is_reusable:
            await self.end()
        return outcome_of(reply)

    async def end(self) -> None:
        if self._session is not None:
            await self._session.end()
            self._session = None


@asynccontextmanager
async def sending_to(url: str, **changes: Any) -> AsyncIterator[Sending]:
    sending = Sending(email_settings(smtp_url=url, **{"smtp_timeout_seconds": 20.0, **changes}))
    yield sending
    await sending.end()


def an_email(*, attempts: int = 0, age: timedelta = timedelta()) -> Email:
    added = time.monotonic() - age.total_seconds()
    email = EmailId(A_STORED_REQUEST.id, 1, "invitation")
    return Email(email, A_STORED_REQUEST, "Acme", attempts, None, added, added)


def outcome_of(
    reply: Reply, *, attempts: int = 0, age: timedelta = timedelta(), others_accepted: bool = True
) -> Outcome:
    email = an_email(attempts=attempts, age=age)
    return replies.outcome_of(reply, email, email_settings(), others_accepted=others_accepted)
