"""The sizes of the outbox, for its gauges."""

from collections.abc import Sequence

import msgspec

from service.postgres.pool import Connection
from worker import metrics
from worker.gauges import COUNT_LIMIT, Reading
from worker.relay.lanes import LaneMarks


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How many events have not left for RabbitMQ, by state, and the age of the oldest pending one."""

    pending: int
    failing: int
    waiting: int
    oldest_seconds: float


def outbox_gauges(marks: LaneMarks) -> Reading:
    """Return the reading of the outbox, which starts at the relay's low-water marks."""

    async def read(connection: Connection) -> None:
        sizes = await read_sizes(connection, marks.low_water, limit=COUNT_LIMIT)
        metrics.outbox_pending.set(sizes.pending)
        metrics.outbox_failing.set(sizes.failing)
        metrics.outbox_waiting.set(sizes.waiting)
        metrics.outbox_oldest_age.set(sizes.oldest_seconds)

    return read


async def read_sizes(connection: Connection, marks: Sequence[int], *, limit: int) -> Sizes:
    """Return the sizes, at a cost that does not grow with them.

    At most *limit* pending events are counted, an equal share of it in each lane, and as many held ones.
    Dead rows below *marks*, the low-water marks of the lanes, cost nothing.
    """
    (row,) = await connection.fetch(
        """
        SELECT pending, failing, waiting, oldest_seconds
          FROM (SELECT count(*) AS pending,
                       greatest(0, extract(epoch FROM now() - min(created_at)))::float8 AS oldest_seconds
                  FROM unnest($1::bigint[]) WITH ORDINALITY AS mark (low_water, number)
                 CROSS JOIN LATERAL (SELECT created_at
                                       FROM outbox
                                      WHERE lane = (number - 1)::smallint
                                        AND id >= low_water
                                      ORDER BY id
                                      LIMIT $2 / cardinality($1::bigint[])) AS head) AS fresh,
               (SELECT count(*) FILTER (WHERE attempts > 0) AS failing,
                       count(*) FILTER (WHERE attempts = 0) AS waiting
                  FROM (SELECT attempts
                          FROM outbox_held
                         LIMIT $2) AS head) AS held
        """,
        marks,
        limit,
    )
    return Sizes(**row)
