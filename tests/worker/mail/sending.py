"""Sends an e-mail to a mail server without a ledger, and says what becomes of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from service.calculation_requests.email_changes import EmailEnd
from tests.harness.examples import SECRET_KEYS
from tests.worker.mail.composing import A_STORED_REQUEST, SENDER, compose
from worker.mail import outcomes
from worker.mail.ledger import Email, Postponement
from worker.mail.replies import Reply
from worker.mail.smtp import Mailer, MailServerUnavailable
from worker.settings import EmailSettings


def mail_settings(url: str, **changes: Any) -> EmailSettings:
    """Return settings with the URL of a mail server; the other servers do not exist."""
    return EmailSettings(
        database_url="postgresql://nowhere.invalid/",
        app_url="https://app.example.com",
        request_secret_keys=SECRET_KEYS,
        amqp_url="amqp://nowhere.invalid/",
        smtp_url=url,
        mail_from="Calculations <calculations@service.example.com>",
        **{"smtp_timeout_seconds": 20.0, **changes},
    )


@asynccontextmanager
async def mailer_for(url: str, **changes: Any) -> AsyncIterator[Mailer]:
    opened = Mailer(mail_settings(url, **changes))
    yield opened
    await opened.close()


async def send(with_mailer: Mailer) -> EmailEnd | Postponement:
    """Send an e-mail. Returns the outcome, as the postman does."""
    try:
        reply = await with_mailer.send(
            SENDER.address, "ada@customer.example.com", compose(), before_content=lambda: None
        )
    except MailServerUnavailable as outage:
        reply = outage.reply
    return outcome_of(reply)


def outcome_of(
    reply: Reply, *, attempts: int = 0, age: timedelta = timedelta(), others_accepted: bool = True
) -> EmailEnd | Postponement:
    """Return the outcome for an e-mail with so many attempts, and of this age."""
    email = Email(A_STORED_REQUEST, "Acme", "event-1", datetime.now(UTC) - age, attempts, None)
    settings = mail_settings("smtp://nowhere.invalid")
    return outcomes.outcome_of(reply, email, settings, others_accepted=others_accepted)
