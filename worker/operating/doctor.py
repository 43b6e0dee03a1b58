"""Whether the worker's settings are right, and whether everything is there that they lead to."""

import argparse
import asyncio
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial

import aio_pika
import aiosmtplib
import asyncpg
from aio_pika.abc import AbstractConnection
from aiormq.exceptions import (
    AuthenticationError,
    ChannelClosed,
    ChannelNotFoundEntity,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from aiosmtplib import (
    SMTPAuthenticationError,
    SMTPException,
    SMTPResponseException,
    SMTPSenderRefused,
)
from pamqp.common import FieldTable
from yarl import URL

from service import settings
from service.calculation_requests.request_secrets import SecretKeyRing
from service.commands import doctor
from service.commands.doctor import Check, Finding, Findings, postgres_check
from service.outbox import writing
from service.postgres import outages
from service.settings import InvalidSetting
from worker.mail.message import Sender
from worker.mail.smtp import Mailer
from worker.operating.tables import Answer, printable
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS
from worker.settings import WorkerSettings
from worker.waiting import rest

_LISTENING = 1  # connection of each relay, beside the pool
_CLOSE_SECONDS = 2.0
_NOTIFY_SECONDS = 2.0
_DAYS_TO_RENEW = 14
_SECONDS_OF_A_DAY = 86_400


async def diagnose(asked: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Check the settings of the worker and what they lead to; the exit status is 1 if anything fails."""
    found = await examine_worker(
        environment, processes=asked.processes, timeout_seconds=asked.timeout_seconds
    )
    return Answer(found, doctor.rendered(found), status=0 if doctor.is_well(found) else 1)


async def examine_worker(
    environment: Mapping[str, str], *, processes: int, timeout_seconds: float
) -> list[Finding]:
    """Check what the worker needs; *processes* is the number of those that share Postgres."""
    read, problems = settings.examine(WorkerSettings, environment)
    parsers = {
        "REQUEST_SECRET_KEYS": lambda: SecretKeyRing.parse(read.request_secret_keys),
        "MAIL_FROM": lambda: Sender.parse(read.mail_from),
    }
    checks = (
        postgres_check(read, connections=processes * (read.database_connections + _LISTENING)),
        Check("listening", ["DATABASE_URL", "LISTEN_DATABASE_URL"], partial(_listening, read)),
        Check("broker", ["AMQP_URL"], partial(_broker, read)),
        Check("mail server", ["SMTP_URL", "MAIL_FROM"], partial(_mail_server, read)),
    )
    return [
        *doctor.settings_findings(problems, parsers),
        *await doctor.examine(checks, problems, timeout_seconds=timeout_seconds),
    ]


async def _listening(read: WorkerSettings) -> Findings:
    """Hear a NOTIFY that comes from another connection: a transaction pooler loses it in silence."""
    heard = asyncio.Event()
    try:
        listening = await asyncpg.connect(read.listen_database_url or read.database_url)
        try:
            await listening.add_listener(writing.CHANNEL, lambda *_: heard.set())
            await _notify(read.database_url)
            await rest(_NOTIFY_SECONDS, heard)
        finally:
            listening.terminate()
    except (*outages.OUTAGE_ERRORS, ValueError) as error:
        return [Finding("fail", "listening", doctor.reason(error), "is LISTEN_DATABASE_URL right?")]
    if heard.is_set():
        return [Finding("ok", "listening", "a NOTIFY is heard")]
    hint = "LISTEN_DATABASE_URL must lead around the pooler; until then events wait for the next poll"
    return [Finding("warn", "listening", "a NOTIFY is not heard", hint)]


async def _notify(url: str) -> None:
    connection = await asyncpg.connect(url, statement_cache_size=0)
    try:
        await writing.notify(connection)
    finally:
        connection.terminate()


async def _broker(read: WorkerSettings) -> Findings:
    """Look at what is declared, and change nothing. Bindings are not looked at: AMQP does not show them."""
    try:
        connection = await aio_pika.connect(URL(read.amqp_url).update_query(name="doctor"))
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
    except BROKER_ERRORS as error:
        return [Finding("fail", "broker", _broker_reason(error), "is AMQP_URL right, and RabbitMQ running?")]


def _broker_reason(error: Exception) -> str:
    match error:
        case AuthenticationError() | ProbableAuthenticationError():
            return "the user or the password is refused"
        case InvalidFrameError():
            return "it closes the connection: is there such a virtual host, and may we use it?"
    return doctor.reason(error)


async def _exchange(connection: AbstractConnection, name: str) -> Finding:
    kind = topology.EXCHANGES[name]
    try:
        await (await connection.channel()).get_exchange(name)
        await (await connection.channel()).declare_exchange(name, kind, durable=True)
    except ChannelClosed as error:
        return _undeclared(f"exchange {name}", error)
    return Finding("ok", f"exchange {name}", f"{kind.value}, durable")


def _queues() -> Iterator[tuple[str, FieldTable]]:
    for queue in topology.QUEUES:
        yield queue.name, queue.arguments
        yield queue.dead_letters, topology.DEAD_LETTER_ARGUMENTS


async def _queue(connection: AbstractConnection, name: str, arguments: FieldTable) -> Finding:
    """Declare a queue as it is: RabbitMQ says what is wrong with it. One that is missing is not created."""
    try:
        await (await connection.channel()).declare_queue(name, passive=True)
        queue = await (await connection.channel()).declare_queue(name, durable=True, arguments=arguments)
    except ChannelClosed as error:
        return _undeclared(f"queue {name}", error)
    count = queue.declaration_result.message_count or 0
    says = f"quorum, durable; {count} messages"
    if count and arguments is topology.DEAD_LETTER_ARGUMENTS:
        return Finding("warn", f"queue {name}", says, "see `python -m worker dead-letters list`")
    return Finding("ok", f"queue {name}", says)


def _undeclared(name: str, error: ChannelClosed) -> Finding:
    """Say why something cannot be declared; the broker quotes names and arguments, and nothing secret."""
    if isinstance(error, ChannelNotFoundEntity):
        return Finding("warn", name, "not there", "a worker declares it when it starts")
    hint = "empty it, delete it, and start a worker, which declares it anew"
    return Finding("fail", name, printable(str(error)), hint)


async def _mail_server(read: WorkerSettings) -> Findings:
    """Go as far as an e-mail does, up to its sender: EHLO, STARTTLS, the certificate, login, MAIL FROM."""
    try:
        connection = await Mailer(read).connect()
        try:
            await connection.mail(Sender.parse(read.mail_from).address)
            return [_security(connection)]
        finally:
            connection.close()
    except InvalidSetting:
        return [Finding("warn", "mail server", "not checked without MAIL_FROM")]
    except (SMTPException, OSError, ValueError) as error:
        return [Finding("fail", "mail server", _mail_reason(error), "what SMTP_URL and MAIL_FROM say")]


def _security(connection: aiosmtplib.SMTP) -> Finding:
    certificate = connection.get_transport_info("peercert")
    if certificate is None:
        hint = "beyond this machine, let SMTP_URL begin with smtp+starttls:// or smtps://"
        return Finding("warn", "mail server", "takes mail from MAIL_FROM, unencrypted", hint)
    days = (ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) / _SECONDS_OF_A_DAY
    says = f"takes mail from MAIL_FROM, encrypted; its certificate ends in {days:.0f} days"
    if days < _DAYS_TO_RENEW:
        return Finding("warn", "mail server", says, "it is time to renew it")
    return Finding("ok", "mail server", says)


def _mail_reason(error: Exception) -> str:
    match error:
        case SMTPAuthenticationError():
            return f"the user or the password is refused ({error.code})"
        case SMTPSenderRefused():
            return f"MAIL_FROM is refused ({error.code})"
        case SMTPResponseException():
            return f"it answers {error.code}"
        case SMTPException() if "STARTTLS" in str(error):
            return "it does not offer STARTTLS"
    return doctor.reason(error)
