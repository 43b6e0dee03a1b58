"""The metrics of the e-mails that are still to be sent."""

import msgspec

from service.postgres.pool import Connection
from worker import metrics
from worker.gauges import COUNT_LIMIT, Reading


class Pending(msgspec.Struct, frozen=True):
    """How many e-mails are neither accepted nor refused for good, and the age of the oldest."""

    number: int
    oldest_seconds: float


def email_gauges() -> Reading:
    """Return the reading of the pending e-mails."""
    return Reading(metrics.EMAIL_GAUGES, _read)


async def _read(connection: Connection) -> None:
    pending = await read_pending(connection, limit=COUNT_LIMIT)
    metrics.emails_pending.set(pending.number)
    metrics.emails_oldest_age.set(pending.oldest_seconds)


async def read_pending(connection: Connection, *, limit: int) -> Pending:
    """Count pending e-mails, at most *limit*. The oldest is the oldest of those counted, the first due."""
    (row,) = await connection.fetch(
        """
        SELECT count(*) AS number,
               greatest(0, extract(epoch FROM now() - min(created_at)))::float8 AS oldest_seconds
          FROM (SELECT created_at
                  FROM email
                 WHERE state = 'pending'
                 ORDER BY next_attempt_at
                 LIMIT $1) AS due_first
        """,
        limit,
    )
    return Pending(**row)
