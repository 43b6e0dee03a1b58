"""Group commit: concurrent callers of one statement share one round trip and one transaction."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import asyncpg

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
    answer: "asyncio.Future[asyncpg.Record | None]"


class _GroupRejected(Exception):
    """Postgres rejected the arguments of a member, so that the statement failed for the whole group."""


class GroupCommit:
    """Runs one statement for all callers that arrive while the first one, the leader, waits for a connection.

    The statement returns one row, with an id in its first column, or nothing. The leader runs the statement
    for every caller present, and passes on the results. No caller waits for others to arrive. Without groups,
    a create takes 1.5 times the processor time (954 µs in the API became 1,209, 199 in Postgres 522), and
    where a commit takes 10 ms, ten connections serve 1,000 creates a second.

    If Postgres rejects the arguments of a caller, the statement fails for the whole group, and is run again
    for each caller alone. If it fails otherwise, or the leader is cancelled because its caller left, the
    others get PostgresUnavailable. A caller that is cancelled before the statement is run stores nothing.
    """

    def __init__(self, pool: Pool, statement: str, *, seconds: float) -> None:
        self._pool = pool
        self._statement = statement
        self._seconds = seconds
        self._gathering: list[_Member] = []  # the group that callers may join, its leader first
        self._gathers_until = -math.inf

    async def execute(
        self, row_id: object, arguments: Sequence[Any], *, until: float, party: str | None = None
    ) -> asyncpg.Record | None:
        """Run the statement with *arguments*; return its row, whose id is *row_id*, or None.

        The leader's deadline applies to the whole group. The other callers' deadlines are not much later,
        because they join only while the leader has more than JOIN_SHARE of its time left.

        Raises PostgresUnavailable, and the errors that the statement raises.
        """
        member = _Member(row_id, arguments, asyncio.get_running_loop().create_future())
        group = self._gathering
        try:
            if group and time.monotonic() < self._gathers_until and len(group) < LARGEST_GROUP:
                with self._pool.place_in_queue(party):
                    group.append(member)
                    return await member.answer
            return await self._lead(member, until=until, party=party)
        except _GroupRejected:
            alone = _Member(row_id, arguments, asyncio.get_running_loop().create_future())
            return next(iter(await self._run([alone], until=until, party=party)), None)

    async def _lead(self, leader: _Member, *, until: float, party: str | None) -> asyncpg.Record | None:
        """Gather a group, run the statement for those that have not given up, and set their answers."""
        group = self._gathering = [leader]
        self._gathers_until = until - self._seconds * JOIN_SHARE
        failure: Callable[[], Exception] = PostgresUnavailable.counted
        try:
            by_id = {row[0]: row for row in await self._run(group, until=until, party=party)}
            for member in group:
                if not member.answer.done():
                    member.answer.set_result(by_id.get(member.row_id))
        except PostgresUnavailable:
            raise
        except Exception as error:
            if len(group) == 1:
                raise
            failure = _GroupRejected
            raise _GroupRejected from error
        finally:
            self._end_gathering(group)
            for follower in group[1:]:
                if not follower.answer.done():
                    follower.answer.set_exception(failure())
        return leader.answer.result()

    async def _run(self, group: list[_Member], *, until: float, party: str | None) -> list[asyncpg.Record]:
        """Run the statement for the members of a group that have not given up."""
        seconds = until - time.monotonic()
        async with connections.acquired(self._pool, seconds=seconds, party=party) as connection:
            await asyncio.sleep(0)  # Lets callers in the same turn of the event loop join.
            self._end_gathering(group)
            # asyncpg runs this as one implicit transaction, so all rows are stored or none is. The timeout is
            # asyncpg's, because cancelling does not end the call while Postgres reads no input.
            rows: list[asyncpg.Record] = await connection.fetchmany(
                self._statement,
                [member.arguments for member in group if not member.answer.done()],
                timeout=until - time.monotonic(),
            )
        return rows

    def _end_gathering(self, group: list[_Member]) -> None:
        if self._gathering is group:
            self._gathering = []
