"""Group commit: callers of one statement at the same time share one round trip and one transaction."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

from service.postgres import loans, outages
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool

LARGEST_GROUP = 32
# Shares of the time for the database.
GATHERING_SHARE = 1 / 4  # for which others may join a leader that waits: its outcome is theirs
SLOW_SHARE = 1 / 4  # after a group that took longer, the next are smaller

Arguments: TypeAlias = Sequence[Any]
Ids: TypeAlias = set[Any]
Answer: TypeAlias = Ids | Exception | None  # what was returned or raised; None when Postgres did not answer


class GroupCommit:
    """Runs a statement, which returns an id or nothing, for all that come while one gets a connection.

    The first to come is the leader: once it has a connection, it runs the statement for all that are there,
    and passes on the outcome. Nobody waits for others to come; but the more there are, the less each costs.
    """

    def __init__(self, pool: Pool, statement: str, *, seconds: float) -> None:
        self._pool = pool
        self._statement = statement
        self._seconds = seconds
        self._largest_now = LARGEST_GROUP
        self._latest: _Group | None = None

    async def execute(self, arguments: Arguments) -> Ids:
        """Run the statement with *arguments*; return the ids that it returned for all that shared it.

        Raises PostgresUnavailable; and whatever the statement raises for these arguments, which the others do
        not get.
        """
        group = self._latest
        if group is not None and self._may_grow(group):
            self._pool.take_place()
            outcome = group.add(arguments)
        else:
            group = self._latest = _Group()
            outcome = group.add(arguments)
            await self._lead(group)
        answer = await outcome
        if answer is None:
            raise outages.unavailable()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _may_grow(self, group: "_Group") -> bool:
        return (
            group.is_gathering
            and len(group.members) < self._largest_now
            and time.monotonic() - group.began < self._seconds * GATHERING_SHARE
        )

    async def _lead(self, group: "_Group") -> None:
        try:
            async with loans.connection(self._pool, seconds=self._seconds) as connection:
                await asyncio.sleep(0)  # Callers of the same turn of the event loop come along.
                self._close(group)
                present = [member for member in group.members if not member.outcome.done()]
                await self._serve(connection, present, until=group.began + self._seconds)
        except PostgresUnavailable:
            if not group.members[0].outcome.done():
                raise
        finally:
            self._close(group)
            for member in group.members:
                member.settle(None)  # unless it has its answer

    def _close(self, group: "_Group") -> None:
        """Let nobody join any more, and give up the followers' places in the queue."""
        if group.is_gathering:
            group.is_gathering = False
            self._pool.leave_places(len(group.members) - 1)

    async def _serve(self, connection: Connection, members: Sequence["_Member"], *, until: float) -> None:
        """Run the statement for all, or for each alone when the arguments of one are refused."""
        try:
            ids = await self._run(connection, [member.arguments for member in members], until=until)
        except Exception as error:
            if len(members) == 1 or outages.means_unavailable(error):
                raise
            await self._serve_each(connection, members, until=until)
        else:
            for member in members:
                member.settle(ids)

    async def _serve_each(
        self, connection: Connection, members: Sequence["_Member"], *, until: float
    ) -> None:
        is_fit = True
        for member in members:
            try:
                answer: Answer = await self._run(connection, [member.arguments], until=until)
            except Exception as error:
                if outages.means_unavailable(error):
                    raise
                answer = error
                is_fit = is_fit and outages.is_harmless(error)
            member.settle(answer)
        if not is_fit:
            connection.terminate()  # See postgres.is_harmless.

    async def _run(self, connection: Connection, group: Sequence[Arguments], *, until: float) -> Ids:
        began = time.monotonic()
        try:
            # While Postgres takes in no more, a cancellation would not end this; asyncpg's own timeout does.
            rows = await connection.fetchmany(self._statement, group, timeout=until - began)
        finally:
            if time.monotonic() - began < self._seconds * SLOW_SHARE:
                self._largest_now = min(self._largest_now + 1, LARGEST_GROUP)
            elif len(group) > 1:
                self._largest_now = len(group) // 2
        return {row[0] for row in rows}


class _Member:
    """A caller: the arguments it came with, and what it waits for."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        # An error is a result, too: as an exception, asyncio would log it, values and all, if nobody asked.
        self.outcome: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def settle(self, answer: Answer) -> None:
        """Give the answer; the first one counts."""
        if not self.outcome.done():
            self.outcome.set_result(answer)


class _Group:
    """A leader, who is the first, and its followers."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.is_gathering = True
        self.members: list[_Member] = []

    def add(self, arguments: Arguments) -> "asyncio.Future[Answer]":
        """Add a member, and return what it has to wait for."""
        self.members.append(_Member(arguments))
        return self.members[-1].outcome
