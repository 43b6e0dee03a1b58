"""Finds discrepancies between requests, events and e-mails, for `reconcile` and for metrics."""

import asyncio
import random
from datetime import datetime
from functools import partial

import asyncpg
import structlog

from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.server.background import in_background
from service.telemetry import logs
from worker import metrics
from worker.mail.replies import RECIPIENT_REFUSED

INTERVAL_SECONDS = 300.0

_log = structlog.get_logger()


async def find_discrepancies(connection: Connection, since: datetime | None = None) -> list[asyncpg.Record]:
    """Return every discrepancy of what was stored since then, or in the last day.

    A row has its name, how many requests have it (perhaps 0), its meaning, and the first such request.
    """
    return await connection.fetch(_FIND, since)


async def run(pool: Pool, stop: asyncio.Event) -> None:
    """Look for discrepancies every five minutes until *stop*, which interrupts a search."""
    async with in_background("reconciliation", partial(_keep_looking, pool)):
        await stop.wait()


async def _keep_looking(pool: Pool) -> None:
    await asyncio.sleep(random.uniform(0, INTERVAL_SECONDS))  # noqa: S311 - spreads the replicas
    while True:
        await look(pool)
        await asyncio.sleep(INTERVAL_SECONDS)


async def look(pool: Pool) -> None:
    """Export the discrepancies of the last day's requests. In an outage the gauges keep their values."""
    try:
        async with connections.acquired(pool, seconds=30.0) as connection:  # for a whole day's requests
            discrepancies = await find_discrepancies(connection)
    except PostgresUnavailable as error:
        _log.warning("reconciliation_failed", error=logs.summarize(error))
        return
    for discrepancy in discrepancies:
        metrics.discrepancies.labels(discrepancy["discrepancy"]).set(discrepancy["requests"])
    metrics.count_age(metrics.reconciliation_age)


# Within five minutes, request.created should be published and the e-mail recorded in the ledger.
_NOT_IN_THE_LEDGER = """
    SELECT id AS request_id
      FROM calculation_request AS request
     WHERE created_at >= coalesce($1, now() - interval '1 day')
       AND created_at < now() - interval '5 min'
       AND NOT EXISTS (SELECT
                         FROM email
                        WHERE email.request_id = request.id)
"""

_REQUESTS_WITHOUT_EMAIL = f"""
    {_NOT_IN_THE_LEDGER}
       AND NOT EXISTS (SELECT
                         FROM outbox
                        WHERE outbox.request_id = request.id)
"""  # noqa: S608 - constants only

# The objective of e-mails counts these, so an e-mail that only its recipient's mailbox refuses is left out. A
# request's first e-mail is late from the create on, however late it came into the ledger.
_OVERDUE_EMAILS = f"""
    {_NOT_IN_THE_LEDGER}
    UNION
    SELECT request_id
      FROM email
      JOIN calculation_request AS request
        ON request.id = request_id
     WHERE request.created_at >= coalesce($1, now() - interval '1 day')
       AND state = 'pending'
       AND CASE number WHEN 1 THEN request.created_at ELSE email.created_at END < now() - interval '5 min'
       AND coalesce(server_reply, '') !~ '{RECIPIENT_REFUSED}'
"""  # noqa: S608 - constants only

_EMAILS_WITHOUT_REQUEST = """
    SELECT DISTINCT request_id
      FROM email
     WHERE created_at >= coalesce($1, now() - interval '1 day')
       AND state = 'pending'
       AND NOT EXISTS (SELECT FROM calculation_request AS request WHERE request.id = request_id)
"""

_OVERDUE_EVENTS = """
    SELECT DISTINCT request_id
      FROM outbox
     WHERE created_at >= coalesce($1, now() - interval '1 day')
       AND created_at < now() - interval '5 min'
"""

# Each discrepancy's meaning, and the statement that finds it in what was stored since $1.
_CHECKS = {
    "request_without_email": (
        "stored over five minutes ago and published, but not in the ledger of e-mails",
        _REQUESTS_WITHOUT_EMAIL,
    ),
    "email_overdue": ("has waited for its e-mail for over five minutes", _OVERDUE_EMAILS),
    "email_without_request": ("was deleted by hand, but has a pending e-mail", _EMAILS_WITHOUT_REQUEST),
    "event_overdue": ("has an event that has been unpublished for over five minutes", _OVERDUE_EVENTS),
}

# One statement, so that all of it sees the same snapshot.
_FIND = " UNION ALL ".join(
    f"""
    SELECT '{name}' AS discrepancy, count(*) AS requests, '{meaning}' AS meaning,
           (array_agg(request_id ORDER BY request_id))[1] AS first_uuid
      FROM ({statement}) AS found
    """  # noqa: S608 - constants only
    for name, (meaning, statement) in _CHECKS.items()
)
