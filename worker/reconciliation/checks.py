"""Stored requests against their events, e-mails and calculations: what there is, and what does not add up."""

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec

from service.identifiers import uuid_of
from service.outbox.events import RequestCreated
from service.postgres.pool import Connection
from worker.operating import replay
from worker.operating.replay import Selection

_EXAMPLES = 10
_PAGE_REQUESTS = 1000
_REPAIRS_PER_SECOND = 200.0

Found = Sequence[Any]  # rows of a request's id, and of how many there are in all


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """From which request on to look, and what takes too long."""

    first_id: UUID = UUID(int=0)
    event_seconds: float = 300.0  # for an event to leave, and for its e-mail to be noted
    email_seconds: float = 3600.0  # for the mail server to accept or refuse


class Anomaly(msgspec.Struct, frozen=True):
    """Something that should not be: how often, and for which requests to begin with."""

    name: str
    meaning: str
    count: int
    uuids: list[str]


class Reconciliation(msgspec.Struct, frozen=True):
    """What there is, by kind and state, and every anomaly, those that did not occur with a count of 0."""

    counts: dict[str, int]
    anomalies: list[Anomaly]
    announced_again: int = 0  # requests without an e-mail, by a repair

    @property
    def is_clean(self) -> bool:
        """Whether everything adds up."""
        return not any(anomaly.count for anomaly in self.anomalies)


async def reconcile(connection: Connection, limits: Limits) -> Reconciliation:
    """Compare the tables as they were at one moment."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        return Reconciliation(
            counts=await count_states(connection, limits.first_id),
            anomalies=[
                _anomaly(
                    "request_without_email",
                    f"published over {limits.event_seconds:g} s ago, and no e-mail is noted",
                    await requests_without_email(connection, limits),
                ),
                _anomaly(
                    "email_overdue",
                    f"neither accepted nor refused for over {limits.email_seconds:g} s",
                    await overdue_emails(connection, limits),
                ),
                _anomaly(
                    "event_overdue",
                    f"not published for over {limits.event_seconds:g} s",
                    await overdue_events(connection, limits),
                ),
                _anomaly(
                    "event_parked", "cannot be encoded, or put aside", await parked_events(connection, limits)
                ),
                _anomaly(
                    "event_orphaned",
                    "an event about a request that does not exist",
                    await orphaned_events(connection, limits),
                ),
                _anomaly(
                    "sequence_wrong",
                    "the events that the rows account for are not those that were counted",
                    await wrong_sequences(connection, limits),
                ),
            ],
        )


async def repair(connection: Connection, limits: Limits) -> int:
    """Publish request.created again for all that `requests_without_email` finds. Returns their number.

    By way of the outbox, and with the same event id: where the e-mail was only late, nothing is sent twice.
    Raises OutboxNotDraining.
    """
    created = Selection(since=None, until=datetime.now(UTC), types=frozenset({RequestCreated.type}))
    tally = await replay.replay_requests(
        connection,
        _pages_without_email(connection, limits),
        created,
        events_per_second=_REPAIRS_PER_SECOND,
        report=lambda _: None,
    )
    return tally.requests


async def _pages_without_email(connection: Connection, limits: Limits) -> AsyncIterator[list[UUID]]:
    while page := await read_ids_without_email(connection, limits):
        yield page
        limits = msgspec.structs.replace(limits, first_id=UUID(int=page[-1].int + 1))


def _anomaly(name: str, meaning: str, found: Found) -> Anomaly:
    count = found[0]["total"] if found else 0
    return Anomaly(name, meaning, count, [uuid_of(row["request_id"]) for row in found])


async def count_states(connection: Connection, first_id: UUID) -> dict[str, int]:
    """Return how many requests, calculations, e-mails and events there are, by state."""
    row = await connection.fetchrow(
        """
        SELECT requests, requests_calculated,
               emails_pending, emails_sent, emails_failed,
               events_pending, events_held, events_parked
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
               (SELECT count(*) FILTER (WHERE parked_at IS NULL) AS events_held,
                       count(parked_at) AS events_parked
                  FROM outbox_held
                 WHERE request_id >= $1) AS held
        """,
        first_id,
    )
    return dict(row or {})


async def requests_without_email(connection: Connection, limits: Limits) -> Found:
    """Find requests whose request.created has left, long ago, and has not come to an e-mail."""
    return await connection.fetch(
        f"SELECT id AS request_id, count(*) OVER () AS total {_WITHOUT_EMAIL}",
        limits.first_id,
        limits.event_seconds,
        _EXAMPLES,
    )


async def read_ids_without_email(connection: Connection, limits: Limits) -> list[UUID]:
    """Return the first of these requests, a page of them."""
    rows = await connection.fetch(
        f"SELECT id {_WITHOUT_EMAIL}", limits.first_id, limits.event_seconds, _PAGE_REQUESTS
    )
    return [row["id"] for row in rows]


_WITHOUT_EMAIL = """
      FROM calculation_request AS request
     WHERE id >= $1
       AND created_at < now() - make_interval(secs => $2)
       AND NOT EXISTS (SELECT
                         FROM email
                        WHERE email.request_id = request.id)
       AND NOT EXISTS (SELECT
                         FROM outbox
                        WHERE outbox.request_id = request.id)
       AND NOT EXISTS (SELECT
                         FROM outbox_held
                        WHERE outbox_held.request_id = request.id)
     ORDER BY id
     LIMIT $3
"""


async def overdue_emails(connection: Connection, limits: Limits) -> Found:
    """Find e-mails that have been pending for too long."""
    return await connection.fetch(
        """
        SELECT request_id, count(*) OVER () AS total
          FROM email
         WHERE request_id >= $1
           AND state = 'pending'
           AND created_at < now() - make_interval(secs => $2)
         ORDER BY request_id
         LIMIT $3
        """,
        limits.first_id,
        limits.email_seconds,
        _EXAMPLES,
    )


async def overdue_events(connection: Connection, limits: Limits) -> Found:
    """Find events that have been pending or held for too long; the parked ones are told apart."""
    return await connection.fetch(
        """
        SELECT request_id, count(*) OVER () AS total
          FROM (SELECT request_id, created_at
                  FROM outbox
                UNION ALL
                SELECT request_id, created_at
                  FROM outbox_held
                 WHERE parked_at IS NULL) AS event
         WHERE request_id >= $1
           AND created_at < now() - make_interval(secs => $2)
         ORDER BY request_id
         LIMIT $3
        """,
        limits.first_id,
        limits.event_seconds,
        _EXAMPLES,
    )


async def parked_events(connection: Connection, limits: Limits) -> Found:
    """Find parked events."""
    return await connection.fetch(
        """
        SELECT request_id, count(*) OVER () AS total
          FROM outbox_held
         WHERE request_id >= $1
           AND parked_at IS NOT NULL
         ORDER BY request_id
         LIMIT $2
        """,
        limits.first_id,
        _EXAMPLES,
    )


async def orphaned_events(connection: Connection, limits: Limits) -> Found:
    """Find events about requests that do not exist."""
    return await connection.fetch(
        """
        SELECT request_id, count(*) OVER () AS total
          FROM (SELECT request_id
                  FROM outbox
                UNION ALL
                SELECT request_id
                  FROM outbox_held) AS event
         WHERE request_id >= $1
           AND NOT EXISTS (SELECT
                             FROM calculation_request AS request
                            WHERE request.id = event.request_id)
         ORDER BY request_id
         LIMIT $2
        """,
        limits.first_id,
        _EXAMPLES,
    )


async def wrong_sequences(connection: Connection, limits: Limits) -> Found:
    """Find requests whose counted events are not one for itself, its settled e-mail and its calculation."""
    return await connection.fetch(
        """
        SELECT request.id AS request_id, count(*) OVER () AS total
          FROM calculation_request AS request
          LEFT JOIN email
            ON email.request_id = request.id
         WHERE request.id >= $1
           AND (request.sequence <> 1 + (request.calculation_id IS NOT NULL)::integer
                                      + (email.settled_at IS NOT NULL)::integer
                OR (request.calculation_id IS NULL) <> (request.calculation_sequence IS NULL)
                OR (email.settled_at IS NULL) <> (email.event_sequence IS NULL)
                OR request.calculation_sequence NOT BETWEEN 2 AND request.sequence
                OR email.event_sequence NOT BETWEEN 2 AND request.sequence
                OR email.event_sequence = request.calculation_sequence)
         ORDER BY request.id
         LIMIT $2
        """,
        limits.first_id,
        _EXAMPLES,
    )
