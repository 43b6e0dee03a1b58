"""`doctor`: whether the worker has what it needs."""

import asyncio
import os
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial

import aio_pika
import aiosmtplib
import asyncpg
import click
from aio_pika.abc import AbstractConnection
from aiormq.exceptions import (
    AuthenticationError,
    ChannelClosed,
    ChannelNotFoundEntity,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from aiosmtplib import SMTPAuthenticationError, SMTPException, SMTPResponseException, SMTPSenderRefused
from pamqp.common import FieldTable
from yarl import URL

from service import diagnosis
from service.calculation_requests.request_secrets import SecretKeyRing
from service.command_line import COUNT, POSITIVE, Answer, answering, printable
from service.diagnosis import TIMEOUT_SECONDS, Check, Finding, Findings, postgres_check
from service.outbox import lanes
from service.postgres import outages
from service.settings import InvalidSetting, examine
from worker.mail.message import Sender
from worker.mail.smtp import Mailer
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS
from worker.settings import WorkerSettings
from worker.waiting import wait_at_most

_LISTENING = 1  # connection of each relay, beside the pool
_CLOSE_SECONDS = 2.0
_NOTIFY_SECONDS = 2.0
_DAYS_TO_RENEW = 14
_SECONDS_OF_A_DAY = 86_400


@click.command()
@click.option("--processes", type=COUNT, default=1, show_default=True, help="Processes that share Postgres.")
@click.option("--timeout-seconds", type=POSITIVE, default=int(TIMEOUT_SECONDS), help="For each check.")
@answering
async def doctor(processes: int, timeout_seconds: int) -> Answer:
    """Check the settings of the worker and the servers they name. Exit status 1 if any check fails."""
    findings = await examine_worker(os.environ, processes=processes, timeout_seconds=timeout_seconds)
    return Answer(findings, diagnosis.rendered(findings), status=diagnosis.exit_status(findings))


async def examine_worker(
    environment: Mapping[str, str], *, processes: int, timeout_seconds: float
) -> list[Finding]:
    """Check what the worker needs; *processes* is the number of those that share Postgres."""
    settings, problems = examine(WorkerSettings, environment)
    parsers = {
        "REQUEST_SECRET_KEYS": lambda: SecretKeyRing.parse(settings.request_secret_keys),
        "MAIL_FROM": lambda: Sender.parse(settings.mail_from),
    }
    checks = (
        postgres_check(settings, connections=processes * (settings.database_pool_size + _LISTENING)),
        Check(
            "listening",
            ["DATABASE_URL", "LISTEN_DATABASE_URL"],
            partial(_listening, settings),
            (*outages.OUTAGE_ERRORS, ValueError),
            "is LISTEN_DATABASE_URL right?",
        ),
        Check(
            "broker",
            ["AMQP_URL"],
            partial(_broker, settings),
            BROKER_ERRORS,
            "is AMQP_URL right, and RabbitMQ running?",
            _broker_reason,
        ),
        Check(
            "mail server",
            ["SMTP_URL", "MAIL_FROM"],
            partial(_mail_server, settings),
            (SMTPException, OSError, ValueError),
            "are SMTP_URL and MAIL_FROM right?",
            _mail_reason,
        ),
    )
    return await diagnosis.diagnose(problems, parsers, checks, timeout_seconds=timeout_seconds)


async def _listening(settings: WorkerSettings) -> Findings:
    """Receive a NOTIFY of another connection: a transaction pooler drops it silently."""
    received = asyncio.Event()
    listening = await asyncpg.connect(settings.listen_database_url or settings.database_url)
    try:
        await listening.add_listener(lanes.CHANNEL, lambda *_: received.set())
        await _notify(settings.database_url)
        await wait_at_most(_NOTIFY_SECONDS, received)
    finally:
        listening.terminate()
    if received.is_set():
        return [Finding("ok", "listening", "a NOTIFY is received")]
    hint = "LISTEN_DATABASE_URL must bypass the pooler; until then events wait for the next poll"
    return [Finding("warn", "listening", "a NOTIFY is not received", hint)]


async def _notify(url: str) -> None:
    connection = await asyncpg.connect(url, statement_cache_size=0)
    try:
        await lanes.notify(connection)
    finally:
        connection.terminate()


async def _broker(settings: WorkerSettings) -> Findings:
    """Compare exchanges and queues with the topology, changing nothing. AMQP does not show bindings."""
    connection = await aio_pika.connect(URL(settings.amqp_url).update_query(name="doctor"))
    try:
        return [
            Finding("ok", "broker", "the login is accepted"),
            *[await _exchange(connection, name) for name in topology.EXCHANGES],
            *[await _queue(connection, name, arguments) for name, arguments in _queues()],
        ]
    finally:
        with suppress(*BROKER_ERRORS):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await connection.close()


def _broker_reason(error: Exception) -> str:
    match error:
        case AuthenticationError() | ProbableAuthenticationError():
            return "user or password refused"
        case InvalidFrameError():
            return "it closes the connection: does the virtual host exist, and may this user access it?"
    return diagnosis.reason(error)


# AMQP does not show the properties of exchanges and queues. But declaring one again with other properties
# is refused, and RabbitMQ names the first difference. The passive declaration before it creates nothing.


async def _exchange(connection: AbstractConnection, name: str) -> Finding:
    kind = topology.EXCHANGES[name]
    try:
        await (await connection.channel()).get_exchange(name)
        await (await connection.channel()).declare_exchange(name, kind, durable=True)
    except ChannelClosed as error:
        return _differs(f"exchange {name}", error)
    return Finding("ok", f"exchange {name}", f"{kind.value}, durable")


def _queues() -> Iterator[tuple[str, FieldTable]]:
    for queue in topology.QUEUES:
        yield queue.name, queue.arguments
        yield queue.dead_letters, topology.DEAD_LETTER_ARGUMENTS


async def _queue(connection: AbstractConnection, name: str, arguments: FieldTable) -> Finding:
    try:
        await (await connection.channel()).declare_queue(name, passive=True)
        queue = await (await connection.channel()).declare_queue(name, durable=True, arguments=arguments)
    except ChannelClosed as error:
        return _differs(f"queue {name}", error)
    count = queue.declaration_result.message_count or 0
    says = f"quorum, durable; {count} messages"
    if count and arguments is topology.DEAD_LETTER_ARGUMENTS:
        return Finding("warn", f"queue {name}", says, "see `python -m worker dead-letters list`")
    return Finding("ok", f"queue {name}", says)


def _differs(name: str, error: ChannelClosed) -> Finding:
    """Report a refused declaration in the broker's words: they quote names and arguments, but no secret."""
    if isinstance(error, ChannelNotFoundEntity):
        return Finding("warn", name, "missing", "a worker declares it when it starts")
    hint = "empty and delete it, then start a worker, which declares it anew"
    return Finding("fail", name, printable(str(error)), hint)


async def _mail_server(settings: WorkerSettings) -> Findings:
    """Begin an e-mail, up to its sender: EHLO, STARTTLS, the certificate, login, MAIL FROM."""
    connection = await Mailer(settings).connect()
    try:
        await connection.mail(Sender.parse(settings.mail_from).address)
        return [_security(connection)]
    except InvalidSetting:
        return [Finding("warn", "mail server", "not checked without MAIL_FROM")]
    finally:
        connection.close()


def _security(connection: aiosmtplib.SMTP) -> Finding:
    certificate = connection.get_transport_info("peercert")
    if certificate is None:
        hint = "outside this machine, begin SMTP_URL with smtp+starttls:// or smtps://"
        return Finding("warn", "mail server", "accepts MAIL_FROM, but without encryption", hint)
    days = (ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) / _SECONDS_OF_A_DAY
    says = f"accepts MAIL_FROM, encrypted; its certificate expires in {days:.0f} days"
    if days < _DAYS_TO_RENEW:
        return Finding("warn", "mail server", says, "renew the certificate")
    return Finding("ok", "mail server", says)


def _mail_reason(error: Exception) -> str:
    match error:
        case SMTPAuthenticationError():
            return f"user or password refused ({error.code})"
        case SMTPSenderRefused():
            return f"MAIL_FROM refused ({error.code})"
        case SMTPResponseException():
            return f"it answers {error.code}"
        case SMTPException() if "STARTTLS" in str(error):
            return "it does not offer STARTTLS"
    return diagnosis.reason(error)
