"""`reconcile`: counts of everything, what does not add up, and the repair of requests without an e-mail."""

import argparse
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from uuid import UUID

import msgspec

from service.identifiers import first_id_at
from service.operations import operator_arguments
from service.operations.operator_actions import Operator
from service.outbox.events import RequestCreated
from service.postgres.pool import Connection
from worker import reconciliation
from worker.operating import arguments, connections, replay
from worker.operating.answers import Answer, table
from worker.operating.arguments import Subcommands, add_command
from worker.operating.replay import Cause, Selection
from worker.reconciliation import Anomaly, Limits

_PAGE_REQUESTS = 1000
_REPAIRS_PER_SECOND = 200.0


class Reconciliation(msgspec.Struct, frozen=True):
    """How many rows there are, by kind and state, and every anomaly, also those with a count of 0."""

    counts: dict[str, int]
    anomalies: list[Anomaly]
    announced_again: int = 0  # requests without an e-mail, by a repair


def add_to(commands: Subcommands) -> None:
    """Add the command to the parser."""
    command = add_command(commands, "reconcile", reconcile)
    add = command.add_argument
    add("--since", type=arguments.time, metavar="TIME", help="only requests stored since then (ISO 8601)")
    add("--repair", action="store_true", help="publish request.created again where there is no e-mail")
    for option, age in (
        ("--event-seconds", Limits().event_seconds),
        ("--email-seconds", Limits().email_seconds),
    ):
        help_text = "the age at which one is overdue (default: %(default)g)"
        add(option, type=arguments.positive, default=age, metavar="SECONDS", help=help_text)
    operator_arguments.add_arguments(command)


async def reconcile(options: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Compare requests, events, e-mails and calculations. Exit status 1 if they do not add up."""
    limits = Limits(
        first_id=first_id_at(options.since) if options.since else UUID(int=0),
        event_seconds=options.event_seconds,
        email_seconds=options.email_seconds,
    )
    async with connections.postgres(environment) as connection:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            found = Reconciliation(
                await count_states(connection, limits.first_id),
                await reconciliation.find_anomalies(connection, limits),
            )
        if options.repair:
            announced = await repair(connection, limits, operator_arguments.operator(options))
            found = msgspec.structs.replace(found, announced_again=announced)
    text = _described(found)
    if options.repair:
        text += f"\n\n{found.announced_again} requests without an e-mail announced again"
    return Answer(found, text, status=int(any(anomaly.count for anomaly in found.anomalies)))


def _described(found: Reconciliation) -> str:
    counts = table(("there are", "number"), found.counts.items())
    rows = [
        (anomaly.name, anomaly.count, anomaly.meaning, ", ".join(anomaly.uuids[:2]))
        for anomaly in found.anomalies
    ]
    return f"{counts}\n\n{table(('anomaly', 'number', 'meaning', 'for example'), rows)}"


async def count_states(connection: Connection, first_id: UUID) -> dict[str, int]:
    """Return how many requests, calculations, e-mails and events there are, by state."""
    row = await connection.fetchrow(
        """
        SELECT requests, requests_calculated,
               emails_pending, emails_sent, emails_failed,
               events_pending, events_held
          FROM (SELECT count(*) AS requests,
                       count(calculation_id) AS requests_calculated
                  FROM calculation_request
                 WHERE id >= $1) AS request,
               (SELECT count(*) FILTER (WHERE state = 'pending') AS emails_pending,
                       count(*) FILTER (WHERE state = 'sent') AS emails_sent,
                       count(*) FILTER (WHERE state = 'failed') AS emails_failed
                  FROM email
                 WHERE request_id >= $1) AS email,
               (SELECT count(*) AS events_pending
                  FROM outbox
                 WHERE request_id >= $1) AS event,
               (SELECT count(*) AS events_held
                  FROM outbox_held
                 WHERE request_id >= $1) AS held
        """,
        first_id,
    )
    return dict(row or {})


async def repair(connection: Connection, limits: Limits, by: Operator) -> int:
    """Publish request.created again for every `request_without_email`. Returns their number.

    The event goes through the outbox and has the same id. Where the e-mail was only late, no second one is
    sent. Raises OutboxNotDraining.
    """
    created = Selection(since=None, until=datetime.now(UTC), types=frozenset({RequestCreated.type}))
    tally = await replay.replay(
        connection,
        _pages_without_email(connection, limits),
        created,
        cause=Cause("reconcile --repair", by),
        events_per_second=_REPAIRS_PER_SECOND,
        report=lambda _: None,
    )
    return tally.requests


async def _pages_without_email(connection: Connection, limits: Limits) -> AsyncIterator[list[UUID]]:
    while page := await reconciliation.read_ids_without_email(connection, limits, limit=_PAGE_REQUESTS):
        yield page
        limits = msgspec.structs.replace(limits, first_id=UUID(int=page[-1].int + 1))
