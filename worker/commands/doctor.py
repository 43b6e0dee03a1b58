"""`doctor`: reports what is wrong with the worker, its servers and its requests."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain

import click
from aio_pika.abc import AbstractConnection
from aiormq.exceptions import ChannelNotFoundEntity
from aiosmtplib import SMTPRecipientRefused, SMTPResponseException

from service.calculation_requests.request_secrets import SecretKeyRing
from service.command_line import connecting, diagnosis
from service.command_line.answering import Answer, answering, printable
from service.command_line.diagnosis import Finding
from service.identifiers import uuid_of
from service.settings import load
from worker import reconciliation
from worker.mail.message import Sender
from worker.mail.replies import Reply, storable
from worker.mail.smtp import Mailer
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BLOCKED, BrokerUnavailable, open_connection
from worker.relay.publisher import Publisher
from worker.settings import EmailSettings

_DECLARE = "start a worker, which declares it if its user may configure; otherwise declare it yourself"
_PUBLISH_SECONDS = 2.0
_ASK_RABBITMQ = "are AMQP_URL and its virtual host right, and is RabbitMQ well?"
_ASK_MAIL_SERVER = "are SMTP_URL and MAIL_FROM right?"


@click.command()
@answering
async def doctor() -> Answer:
    """Report what is wrong with the worker, its servers and requests. The exit status is 1 if anything is."""
    return diagnosis.answer(await examine_worker(os.environ))


async def examine_worker(environment: Mapping[str, str]) -> list[Finding]:
    """Check the worker's servers, and the requests of the last day. Raises InvalidSetting."""
    settings = load(EmailSettings, environment)
    ring, sender = SecretKeyRing.parse(settings.request_secret_keys), Sender.parse(settings.mail_from)
    found = await asyncio.gather(
        diagnosis.check("postgres", diagnosis.postgres(settings, ring), do=diagnosis.POSTGRES_DO),
        diagnosis.check("requests", _requests(settings), do=diagnosis.POSTGRES_DO),
        diagnosis.check("rabbitmq", _rabbitmq(settings), do=_ASK_RABBITMQ),
        diagnosis.check("mail server", _mail_server(settings, sender.address), do=_ASK_MAIL_SERVER),
        diagnosis.check("bounces", _bounces(settings), do="is BOUNCES_URL right?"),
    )
    return [*chain.from_iterable(found)]


async def _requests(settings: EmailSettings) -> AsyncIterator[Finding]:
    """Look for discrepancies in the last day's requests, such as customers without an e-mail."""
    async with connecting.postgres(settings.database_url) as connection:
        found = [row for row in await reconciliation.find_discrepancies(connection) if row["requests"]]
    for name, count, meaning, first in found:
        do = f"`python -m worker trace {uuid_of(first)}` shows one of them, `reconcile` counts all"
        yield Finding("wrong", name, f"{count} requests: {meaning}", do)
    if not found:
        yield Finding("ok", "requests", "each has its e-mail or is about to, and nothing is overdue")


async def _rabbitmq(settings: EmailSettings) -> AsyncIterator[Finding]:
    """Log in, count the messages of each queue, and look for an alarm. Nothing is declared."""
    seconds = diagnosis.CHECK_SECONDS
    async with open_connection(settings.amqp_url, name="doctor", seconds=seconds) as connection:
        yield Finding("ok", "rabbitmq", "accepts the login")
        for queue in topology.QUEUES:
            yield await _queue(connection, queue.name, is_read=True)
            yield await _queue(connection, queue.dead_letters, is_read=False)
        channel = await (await connection.channel()).get_underlay_channel()
        try:  # The last check, because during an alarm RabbitMQ then reads no more from the connection.
            await Publisher(channel, timeout_seconds=_PUBLISH_SECONDS).probe(exchange="")
        except BrokerUnavailable as error:
            if str(error) == BLOCKED:  # Users other than operators may not publish to the default exchange.
                yield Finding("wrong", "publishing", BLOCKED, "see BrokerBlocked in the runbook")


async def _queue(connection: AbstractConnection, name: str, *, is_read: bool) -> Finding:
    """Count the messages of a queue and, if it *is_read* by a worker, its consumers."""
    check = f"queue {name}"
    try:
        counted = (await (await connection.channel()).get_queue(name)).declaration_result
    except ChannelNotFoundEntity:
        return Finding("wrong", check, "missing", _DECLARE)
    messages, consumers = counted.message_count or 0, counted.consumer_count
    if not is_read:
        do = "`python -m worker dead-letters list` shows why" if messages else None
        return Finding("warning" if messages else "ok", check, f"{messages} messages", do)
    says = f"{messages} messages, {consumers} consumers"
    if consumers:
        return Finding("ok", check, says)
    return Finding("wrong" if messages else "warning", check, says, "start a worker that reads it")


async def _mail_server(settings: EmailSettings, sender: str) -> AsyncIterator[Finding]:
    """Start an e-mail from MAIL_FROM to itself: EHLO, STARTTLS, the certificate, login, MAIL, RCPT.

    RCPT may be refused for what is wrong with us, and may then be the first command that is refused.
    """
    try:
        connection = await Mailer(settings).connect()
        try:
            await connection.mail(sender)
            await connection.rcpt(sender)
        finally:
            connection.close()
    except SMTPResponseException as error:
        reply = Reply("RCPT", error.code, storable(error.message))
        if not isinstance(error, SMTPRecipientRefused) or reply.fault == "sender":
            says = f"it answers {printable(reply.words)} ({type(error).__name__})"
            yield Finding("wrong", "mail server", says, _ASK_MAIL_SERVER)
            return
    yield Finding("ok", "mail server", "accepts MAIL_FROM")


async def _bounces(settings: EmailSettings) -> AsyncIterator[Finding]:
    """Open the mailbox as the workers do."""
    if settings.bounces_url is None:
        unset = "unknown: BOUNCES_URL is not set"
        yield Finding("warning", "bounces", unset, "see Bounces in deploy/README.md")
        return
    from worker.mail import mailbox

    with ExitStack() as stack:
        await mailbox.in_thread(partial(stack.enter_context, mailbox.opened(settings)))
    yield Finding("ok", "bounces", "the mailbox can be read")
