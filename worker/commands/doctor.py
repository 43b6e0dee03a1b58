"""`doctor`: reports what is wrong with the worker, its servers, requests, events and e-mails."""

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial

import click
from aio_pika import Message
from aio_pika.abc import AbstractConnection
from aiormq.exceptions import (
    AuthenticationError,
    ChannelNotFoundEntity,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from aiosmtplib import (
    SMTPAuthenticationError,
    SMTPRecipientRefused,
    SMTPResponseException,
    SMTPSenderRefused,
)
from yarl import URL

from service.calculation_requests.request_secrets import SecretKeyRing
from service.command_line import diagnosis
from service.command_line.answering import Answer, answering, printable
from service.command_line.diagnosis import Check, Finding, Reasons
from service.identifiers import first_id_at
from service.postgres.pool import Connection
from service.settings import examine
from worker import reconciliation
from worker.mail.message import Sender
from worker.mail.replies import Reply
from worker.mail.smtp import Mailer
from worker.rabbitmq import topology
from worker.rabbitmq.connection import is_blocked, open_connection
from worker.rabbitmq.topology import Queue
from worker.settings import EmailSettings

_MISSING = "missing"
_DECLARE = "start a worker, which declares it if its user may configure; otherwise declare it yourself"
_ALARM_SECONDS = 0.2  # after a publish, because RabbitMQ blocks only connections that have published
_DAYS_TO_RENEW = 14
_SECONDS_OF_A_DAY = 86_400

_OF_RABBITMQ: Reasons = {
    AuthenticationError: "user or password refused",
    ProbableAuthenticationError: "user or password refused",
    InvalidFrameError: "it closes the connection: does the virtual host exist, and may this user access it?",
}
_VERIFY_RABBITMQ = "begin AMQP_URL with amqps://, without no_verify_ssl"
_VERIFY_SMTP = "begin SMTP_URL with smtp+starttls:// or smtps://"
_CHECK_SMTP_SETTINGS = "are SMTP_URL and MAIL_FROM right?"
_OF_SMTP: Reasons = {
    SMTPAuthenticationError: "user or password refused ({0.code})",
    SMTPSenderRefused: "MAIL_FROM refused ({0.code})",
    SMTPResponseException: "it answers {0.code}",
}


@click.command()
@click.option("--watch", is_flag=True, help="Repeat every five seconds.")
@answering
async def doctor(*, watch: bool) -> Answer:
    """Report what is wrong with the worker, its servers, events and e-mails, and what to do first.

    The exit status is 1 if anything is wrong.
    """
    return await diagnosis.answer(partial(examine_worker, os.environ), watch=watch)


async def examine_worker(environment: Mapping[str, str]) -> list[Finding]:
    """Check the worker's settings and servers, and its requests, events and e-mails."""
    settings, problems = examine(EmailSettings, environment)
    parsers = {
        "REQUEST_SECRET_KEYS": lambda: SecretKeyRing.parse(settings.request_secret_keys),
        "MAIL_FROM": lambda: Sender.parse(settings.mail_from),
    }
    broker, mail = partial(_rabbitmq, settings), partial(_mail_server, settings)
    checks = (
        diagnosis.postgres_check(
            settings.database_url,
            settings.request_secret_keys,
            _events,
            _emails,
            _requests,
            listen_url=settings.listen_database_url,
        ),
        *diagnosis.pooler_checks(settings.pooler_database_url),
        diagnosis.app_check(settings.app_url),
        Check("rabbitmq", ["AMQP_URL"], broker, "is AMQP_URL right, and RabbitMQ well?", _OF_RABBITMQ),
        Check("mail server", ["SMTP_URL", "MAIL_FROM"], mail, _CHECK_SMTP_SETTINGS, _OF_SMTP),
    )
    return await diagnosis.diagnose(problems, parsers, checks)


async def _events(connection: Connection) -> AsyncIterator[Finding]:
    """Count the unpublished events by state."""
    rows = await connection.fetch(
        """
        SELECT state, count(*) AS events, extract(epoch FROM now() - min(created_at)) AS age
          FROM undelivered_event
         GROUP BY state
         ORDER BY state
        """
    )
    counts = ", ".join(f"{row['events']} {row['state']}, the oldest for {row['age']:.0f} s" for row in rows)
    is_refused = any(row["state"] == "retrying" for row in rows)
    do = "`python -m worker outbox list` shows why RabbitMQ refuses them" if is_refused else None
    yield Finding("warning" if do else "ok", "events", f"unpublished: {counts or 'none'}", do)


async def _emails(connection: Connection) -> AsyncIterator[Finding]:
    """Count the pending e-mails, and all e-mails of the last day's requests, by state and reply or reason."""
    rows = await connection.fetch(
        """
        SELECT state, count(*) AS emails,
               coalesce(substring(server_reply FROM '^[45][0-9]{2}(?: [45](?:[.][0-9]{1,3}){2})?'),
                        nullif(smtp_code, 0)::text, reason) AS why
          FROM email
         WHERE request_id >= $1
            OR state = 'pending'
         GROUP BY state, why
         ORDER BY state, why
        """,
        first_id_at(datetime.now(UTC) - timedelta(days=1)),
    )
    parts = (" ".join(filter(None, (str(row["emails"]), row["state"], row["why"]))) for row in rows)
    is_refused = any(row["why"] not in {None, "cancelled"} for row in rows)
    do = "`python -m worker emails list` shows the mail server's replies" if is_refused else None
    yield Finding("warning" if do else "ok", "e-mails", f"of the last day: {', '.join(parts) or 'none'}", do)


async def _requests(connection: Connection) -> AsyncIterator[Finding]:
    """Look for discrepancies in the last day's requests, such as customers without an e-mail."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        found = [each for each in await reconciliation.find_recent(connection) if each.count]
    for discrepancy in found:
        do = f"`python -m worker trace {discrepancy.uuids[0]}` shows one of them, `reconcile` all"
        yield Finding("wrong", discrepancy.name, f"{discrepancy.count} requests: {discrepancy.meaning}", do)
    if not found:
        yield Finding("ok", "requests", "each has its e-mail or is about to, and nothing is overdue")


async def _rabbitmq(settings: EmailSettings) -> AsyncIterator[Finding]:
    """Check the queues and the alarm. Declare the topology, as a worker does every minute."""
    url = URL(settings.amqp_url)
    async with open_connection(url, name="doctor", seconds=diagnosis.CHECK_SECONDS) as connection:
        is_verified = url.scheme == "amqps" and url.query.get("no_verify_ssl", "0") == "0"
        ok = is_verified or diagnosis.is_on_this_machine(settings.amqp_url)
        yield diagnosis.encryption("rabbitmq", "accepts the login", _VERIFY_RABBITMQ, ok=ok)
        found = [await _queue(connection, queue, is_read=True) for queue in topology.QUEUES]
        found += [await _queue(connection, queue, is_read=False) for queue in topology.QUEUES]
        for finding in found:
            yield finding
        if not any(finding.says == _MISSING for finding in found):  # `ensure` would create it.
            creates = await topology.may_create(connection)
            for name, difference in (await topology.ensure(connection, creates=creates)).items():
                do = f"empty and delete it, then {_DECLARE}"
                yield Finding("wrong", name, printable(difference), do)
        yield await _alarm(connection)


async def _queue(connection: AbstractConnection, queue: Queue, *, is_read: bool) -> Finding:
    """Count the messages of a queue if *is_read*, otherwise the messages of its dead-letter queue."""
    name = queue.name if is_read else queue.dead_letters
    try:
        counted = (await (await connection.channel()).get_queue(name)).declaration_result
    except ChannelNotFoundEntity:
        return Finding("wrong", f"queue {name}", _MISSING, _DECLARE)
    messages, consumers = counted.message_count or 0, counted.consumer_count
    says = f"{messages} messages, {consumers} consumers" if is_read else f"{messages} messages"
    if is_read and not consumers:
        return Finding(
            "wrong" if messages else "warning", f"queue {name}", says, "start a worker that reads it"
        )
    if messages and not is_read:
        return Finding("warning", f"queue {name}", says, "`python -m worker dead-letters list` shows why")
    return Finding("ok", f"queue {name}", says)


async def _alarm(connection: AbstractConnection) -> Finding:
    """Publish a message that no queue gets, and check whether RabbitMQ then blocks the connection."""
    channel = await connection.channel(publisher_confirms=False)
    await channel.default_exchange.publish(Message(b""), "doctor", mandatory=False)
    await asyncio.sleep(_ALARM_SECONDS)
    if await is_blocked(await channel.get_underlay_channel()):
        says, do = "it is over its limit of memory or disk", "see BrokerBlocked in the runbook"
        return Finding("wrong", "rabbitmq's alarm", says, do)
    return Finding("ok", "rabbitmq's alarm", "none")


async def _mail_server(settings: EmailSettings) -> AsyncIterator[Finding]:
    """Start an e-mail from MAIL_FROM to itself: EHLO, STARTTLS, the certificate, login, MAIL, RCPT.

    RCPT may be refused for what is wrong with us, and may then be the first command that is refused.
    """
    sender = Sender.parse(settings.mail_from).address
    connection = await Mailer(settings).connect()
    try:
        await connection.mail(sender)
        certificate = connection.get_transport_info("peercert")
        await connection.rcpt(sender)
    except SMTPRecipientRefused as error:
        refusal = Reply("RCPT", error.code, error.message)
        if refusal.fault == "sender":
            says = f"it refuses e-mails of ours: {printable(refusal.words)}"
            yield Finding("wrong", "mail server", says, _CHECK_SMTP_SETTINGS)
            return
    finally:
        connection.close()
    if certificate is None:
        ok = diagnosis.is_on_this_machine(settings.smtp_url)
        yield diagnosis.encryption("mail server", "accepts MAIL_FROM", _VERIFY_SMTP, ok=ok)
        return
    days = (ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) / _SECONDS_OF_A_DAY
    says = f"accepts MAIL_FROM, encrypted; its certificate expires in {days:.0f} days"
    yield Finding("ok" if days >= _DAYS_TO_RENEW else "warning", "mail server", says)
