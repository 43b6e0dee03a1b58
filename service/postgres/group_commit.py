"""Group commit: concurrent callers of one statement share one round trip and one transaction."""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool
from service.settings import JOIN_SHARE

# The leader may wait for a connection for half of DATABASE_TIMEOUT_SECONDS. The other half must suffice for
# the whole group. With 8 members it does while Postgres needs less than 60 ms for a row. Groups of up to 32
# would save about a tenth of the processor time that a create takes in the API and Postgres, 0.7 ms.
LARGEST_GROUP = 8


class _Member(NamedTuple):
    """A caller that waits for the row with its id."""

    row_id: Any
    arguments: Sequence[Any]
    answer: "asyncio.Future[Sequence[Any] | None]"


class GroupCommit:
    """Runs one statement for all callers that arrive while the first one, the leader, waits for a connection.

    The statement returns one row, with an id in its first column, or nothing. No caller waits for others to
    arrive. Without groups, a create takes 1.5 times the processor time, and where a commit takes 10 ms, ten
    connections serve 1,000 creates a second.

    If the statement fails, the leader gets the error, and the other callers get PostgresUnavailable, as they
    do if the leader is cancelled. So validate the arguments before. A caller that is cancelled before the
    statement is run stores nothing.
    """

    def __init__(self, pool: Pool, statement: str, *, seconds: float) -> None:
        self._pool = pool
        self._statement = statement
        self._seconds = seconds
        self._gathering: list[_Member] = []  # the group that callers may join, its leader first
        self._gathers_until = -math.inf

    async def execute(
        self, row_id: object, arguments: Sequence[Any], *, until: float, party: str | None = None
    ) -> Sequence[Any] | None:
        """Run the statement with *arguments*; return its row, whose id is *row_id*, or None.

        The leader's deadline applies to the whole group. The others' are not much later, because they join
        only while it has more than JOIN_SHARE of its time left. Raises PostgresUnavailable, and the errors
        that the statement raises.
        """
        member = _Member(row_id, arguments, asyncio.get_running_loop().create_future())
        group = self._gathering
        if group and time.monotonic() < self._gathers_until and len(group) < LARGEST_GROUP:
            with self._pool.place_in_queue(party):
                group.append(member)
                return await member.answer
        group = self._gathering = [member]
        self._gathers_until = until - self._seconds * JOIN_SHARE
        try:
            await self._lead(group, until=until, party=party)
        finally:
            self._end_gathering(group)
            for follower in group[1:]:
                if not follower.answer.done():
                    follower.answer.set_exception(PostgresUnavailable.counted())
        return member.answer.result()

    async def _lead(self, group: list[_Member], *, until: float, party: str | None) -> None:
        """Run the statement for all members that have not given up, and set their answers."""
        seconds = until - time.monotonic()
        async with connections.acquired(self._pool, seconds=seconds, party=party) as connection:
            await asyncio.sleep(0)  # Lets callers in the same turn of the event loop join.
            self._end_gathering(group)
            present = [member for member in group if not member.answer.done()]
            # asyncpg runs this as one implicit transaction, so all rows are stored or none is. The timeout is
            # asyncpg's, because cancelling does not end the call while Postgres reads no input.
            rows = await connection.fetchmany(
                self._statement,
                [member.arguments for member in present],
                timeout=until - time.monotonic(),
            )
        by_id = {row[0]: row for row in rows}
        for member in present:
            if not member.answer.done():
                member.answer.set_result(by_id.get(member.row_id))

    def _end_gathering(self, group: list[_Member]) -> None:
        if self._gathering is group:
            self._gathering = []
