"""Operator commands: `python -m worker outbox|dead-letters|trace|reconcile|doctor`."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias
from uuid import UUID

import asyncpg
import msgspec
from aio_pika.abc import AbstractConnection

from service.calculation_requests.model import RequestNotFound
from service.commands.doctor import TIMEOUT_SECONDS
from service.postgres import outages, schema
from service.postgres.pool import Connection
from service.postgres.schema import SchemaOutdated
from service.settings import DatabaseSettings, InvalidSetting, load
from worker.operating import arguments, dead_letter_queues, doctor, outbox, request_history
from worker.operating import dead_letters as operating_dead_letters
from worker.operating import trace as operating_trace
from worker.operating.arguments import InvalidArgument
from worker.operating.dead_letter_queues import (
    DeadLettersInUse,
    LetterNotFound,
    LiveQueueRefuses,
    QueueMissing,
    UnknownQueue,
)
from worker.operating.outbox import LaneBusy
from worker.operating.replay import OutboxNotDraining
from worker.operating.tables import Answer, printable, table
from worker.rabbitmq.connection import BrokerUnavailable
from worker.reconciliation import checks
from worker.reconciliation.checks import Limits
from worker.settings import AmqpUrl

COMMANDS = frozenset({"outbox", "dead-letters", "trace", "reconcile", "doctor"})

_STATEMENT_SECONDS = 60.0
_QUEUES = ", ".join(dead_letter_queues.QUEUES)

# What may go wrong without a fault of ours: one line, exit status 1.
EXPECTED = (
    BrokerUnavailable,
    DeadLettersInUse,
    InvalidArgument,
    InvalidSetting,
    LaneBusy,
    LetterNotFound,
    LiveQueueRefuses,
    OutboxNotDraining,
    QueueMissing,
    RequestNotFound,
    SchemaOutdated,
    UnknownQueue,
)

OnDatabase = Callable[[Connection, argparse.Namespace], Awaitable[Answer]]
OnBroker = Callable[[AbstractConnection, argparse.Namespace], Awaitable[Answer]]
Run = Callable[[argparse.Namespace, Mapping[str, str]], Awaitable[Answer]]
Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - its only name


class BrokerSettings(msgspec.Struct, frozen=True, rename="upper"):
    """What the commands on the dead letters need."""

    amqp_url: AmqpUrl


def main(words: Sequence[str]) -> int:
    """Run one command. Expected trouble is one line on standard error and exit status 1."""
    logging.disable()  # The libraries log what they also raise.
    try:
        asked = parser().parse_args(words)
        answer = asyncio.run(execute(asked, os.environ))
    except EXPECTED as error:
        return _fail(str(error) or error.__doc__ or "")
    except outages.OUTAGE_ERRORS as error:
        return _fail(f"Postgres at DATABASE_URL cannot be reached ({type(error).__name__}).")
    except KeyboardInterrupt:
        return _fail("Interrupted. What was done so far is kept, and the command may be run again.")
    sys.stdout.write(answer.rendered(as_json=asked.json) + "\n")
    return answer.status


def _fail(message: str) -> int:
    sys.stderr.write(printable(message) + "\n")
    return 1


async def execute(asked: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Run a parsed command and return its answer."""
    run: Run = asked.run
    return await run(asked, environment)


async def _with_connection(
    command: OnDatabase,
    asked: argparse.Namespace,
    environment: Mapping[str, str],
) -> Answer:
    connection = await _connect(load(DatabaseSettings, environment).database_url)
    try:
        await schema.check(connection)
        return await command(connection, asked)
    finally:
        await connection.close(timeout=10)


async def _connect(url: str) -> Connection:
    try:
        return await asyncpg.connect(
            url,
            timeout=10,
            command_timeout=_STATEMENT_SECONDS,
            statement_cache_size=0,  # prepared statements do not go through every pooler
            server_settings={"application_name": "calculation-requests operator"},
        )
    except ValueError:
        raise InvalidSetting("DATABASE_URL: not the address of a Postgres") from None


async def _with_broker(
    command: OnBroker,
    asked: argparse.Namespace,
    environment: Mapping[str, str],
) -> Answer:
    async with dead_letter_queues.connect(load(BrokerSettings, environment).amqp_url) as broker:
        return await command(broker, asked)


async def trace_request(connection: Connection, asked: argparse.Namespace) -> Answer:
    """Tell where one request stands: its events, the e-mail and the mail server's reply, the calculation."""
    trace = await operating_trace.trace(connection, asked.uuid)
    return Answer(trace, operating_trace.described(trace))


async def reconcile(connection: Connection, asked: argparse.Namespace) -> Answer:
    """Compare requests, events, e-mails and calculations; the exit status is 1 if they do not add up."""
    limits = Limits(
        first_id=request_history.id_at(asked.since) if asked.since else UUID(int=0),
        event_seconds=asked.event_seconds,
        email_seconds=asked.email_seconds,
    )
    found = await checks.reconcile(connection, limits)
    if asked.repair:
        announced = await checks.repair(connection, limits)
        found = msgspec.structs.replace(found, announced_again=announced)
    counts = table(("there are", "number"), found.counts.items())
    rows = [
        (anomaly.name, anomaly.count, anomaly.meaning, ", ".join(anomaly.uuids[:2]))
        for anomaly in found.anomalies
    ]
    anomalies = table(("anomaly", "number", "meaning", "for example"), rows)
    said = f"{counts}\n\n{anomalies}"
    if asked.repair:
        said += f"\n\n{found.announced_again} requests without an e-mail announced again"
    return Answer(found, said, status=0 if found.is_clean else 1)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all operator commands."""
    root = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    _add_outbox(commands.add_parser("outbox", help="Events that have not left for RabbitMQ, and replay."))
    _add_dead_letters(commands.add_parser("dead-letters", help="Messages that our consumers refused."))
    trace = _on_database(commands, "trace", trace_request)
    trace.add_argument("uuid", type=arguments.request_id, help="req_…")
    compare = _on_database(commands, "reconcile", reconcile)
    compare.add_argument(
        "--since", type=arguments.time, metavar="TIME", help="only requests stored from then on"
    )
    compare.add_argument(
        "--repair", action="store_true", help="then publish request.created again where no e-mail is noted"
    )
    for option, default in (
        ("--event-seconds", Limits().event_seconds),
        ("--email-seconds", Limits().email_seconds),
    ):
        compare.add_argument(
            option, type=arguments.positive, default=default, metavar="SECONDS", help="before it is overdue"
        )
    check = _command(commands, "doctor", doctor.diagnose, doctor.diagnose.__doc__)
    check.add_argument(
        "--processes", type=arguments.count, default=1, metavar="N", help="that share Postgres; 1"
    )
    check.add_argument(
        "--timeout-seconds", type=arguments.positive, default=TIMEOUT_SECONDS, metavar="SECONDS", help="10"
    )
    return root


def _add_outbox(parent: argparse.ArgumentParser) -> None:
    commands = parent.add_subparsers(required=True, metavar="COMMAND")
    _on_database(commands, "stats", outbox.stats)
    listing = _on_database(commands, "list", outbox.list_events)
    listing.add_argument("--pending", action="store_true", help="the head of the outbox instead")
    listing.add_argument("--limit", type=arguments.count, default=50)
    retry = _on_database(commands, "retry", outbox.retry)
    retry.add_argument("event_ids", nargs="*", metavar="EVENT_ID")
    retry.add_argument("--all-parked", action="store_true")
    park = _on_database(commands, "park", outbox.park)
    park.add_argument("event_ids", nargs="+", metavar="EVENT_ID")
    replay = _on_database(commands, "replay", outbox.replay_events)
    replay.add_argument(
        "--from", dest="since", type=arguments.time, metavar="TIME", help="ISO 8601, UTC if it does not say"
    )
    replay.add_argument(
        "--to", dest="until", type=arguments.time, metavar="TIME", help="the first moment left out; now"
    )
    replay.add_argument(
        "--type", dest="types", action="append", type=arguments.event_type, help="may be given again; all"
    )
    replay.add_argument("--uuid", type=arguments.request_id, help="of one request only: req_…")
    replay.add_argument("--rate", type=arguments.positive, default=200.0, help="events per second; 200")
    replay.add_argument("--dry-run", action="store_true", help="only count")


def _add_dead_letters(parent: argparse.ArgumentParser) -> None:
    commands = parent.add_subparsers(required=True, metavar="COMMAND")
    listing = _on_broker(commands, "list", operating_dead_letters.list_letters)
    listing.add_argument("queues", nargs="*", metavar="QUEUE", help=f"of {_QUEUES}; all when none is named")
    listing.add_argument("--limit", type=arguments.count, default=20)
    show = _on_broker(commands, "show", operating_dead_letters.show)
    show.add_argument("queue", help=_QUEUES)
    show.add_argument("message_id", nargs="?")
    show.add_argument("--position", type=arguments.count, help="as listed, for a message without an id")
    redrive = _on_broker(commands, "redrive", operating_dead_letters.redrive)
    redrive.add_argument("queue", help=_QUEUES)
    redrive.add_argument("--message-id", dest="message_ids", action="append", help="may be given again; all")
    for command in (show, redrive):
        command.add_argument("--limit", type=arguments.count, default=1000, help="messages to look at; 1000")


def _on_database(commands: Subcommands, name: str, run: OnDatabase) -> argparse.ArgumentParser:
    return _command(commands, name, partial(_with_connection, run), run.__doc__)


def _on_broker(commands: Subcommands, name: str, run: OnBroker) -> argparse.ArgumentParser:
    return _command(commands, name, partial(_with_broker, run), run.__doc__)


def _command(commands: Subcommands, name: str, run: Run, description: str | None) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=description, description=description)
    command.add_argument("--json", action="store_true", help="for scripts")
    command.set_defaults(run=run)
    return command
