"""The relay's metrics: the sizes of the outbox, and the events that have left it."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from service.outbox.events import EVENT_TYPES
from service.postgres.pool import Connection
from worker import metrics
from worker.gauges import COUNT_LIMIT, Reading
from worker.relay.low_water import LaneMarks
from worker.relay.outbox import OutboxRow


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How many events have not left for RabbitMQ, by state, and the age of the oldest pending one."""

    pending: int
    failing: int
    waiting: int
    parked: int
    oldest_seconds: float


def outbox_gauges(marks: LaneMarks) -> Reading:
    """Return the reading of the outbox, which starts at the relay's low-water marks."""

    async def read(connection: Connection) -> None:
        sizes = await read_sizes(connection, marks.low_water, limit=COUNT_LIMIT)
        metrics.outbox_pending.set(sizes.pending)
        metrics.outbox_failing.set(sizes.failing)
        metrics.outbox_waiting.set(sizes.waiting)
        metrics.outbox_parked.set(sizes.parked)
        metrics.outbox_oldest_age.set(sizes.oldest_seconds)

    return Reading(metrics.OUTBOX_GAUGES, read)


async def read_sizes(connection: Connection, marks: Sequence[int], *, limit: int) -> Sizes:
    """Return the sizes, at a cost that does not grow with them.

    At most *limit* pending events are counted, an equal share of it in each lane, and as many held ones.
    Dead rows below *marks*, the low-water marks of the lanes, cost nothing.
    """
    (row,) = await connection.fetch(
        """
        SELECT pending, failing, waiting, parked, oldest_seconds
          FROM (SELECT count(*) AS pending,
                       greatest(0, extract(epoch FROM now() - min(created_at)))::float8 AS oldest_seconds
                  FROM unnest($1::bigint[]) WITH ORDINALITY AS mark (low_water, number)
                 CROSS JOIN LATERAL (SELECT created_at
                                       FROM outbox
                                      WHERE lane = (number - 1)::smallint
                                        AND id >= low_water
                                      ORDER BY id
                                      LIMIT $2 / cardinality($1::bigint[])) AS head) AS fresh,
               (SELECT count(*) FILTER (WHERE parked_at IS NULL AND attempts > 0) AS failing,
                       count(*) FILTER (WHERE parked_at IS NULL AND attempts = 0) AS waiting,
                       count(*) FILTER (WHERE parked_at IS NOT NULL) AS parked
                  FROM (SELECT attempts, parked_at
                          FROM outbox_held
                         LIMIT $2) AS head) AS held
        """,
        marks,
        limit,
    )
    return Sizes(**row)


def count_settled(rows: Sequence[OutboxRow]) -> None:
    """Count events that were confirmed and have left the outbox. Unknown types are counted as "other"."""
    now = datetime.now(UTC)
    for event_type, number in Counter(row.type for row in rows).items():
        metrics.events_published.labels(event_type if event_type in EVENT_TYPES else "other").inc(number)
    for row in rows:
        metrics.delivery_seconds.observe(max(0.0, (now - row.created_at).total_seconds()))
