"""Group commit: concurrent callers of one statement share one round trip and one transaction."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from service.postgres import loans
from service.postgres.outages import PostgresUnavailable, is_harmless, is_outage
from service.postgres.pool import Connection, Pool

LARGEST_GROUP = 32
# Shares of the time for the database.
GATHERING_SHARE = 1 / 4  # After it no one joins a waiting leader: followers share the leader's fate.
SLOW_SHARE = 1 / 4  # After a group that took longer, the next ones are smaller.

Arguments: TypeAlias = Sequence[Any]
Ids: TypeAlias = set[Any]


class Returned(NamedTuple):
    """The ids that the statement returned for the whole group."""

    ids: Ids


class Raised(NamedTuple):
    """What the statement raised for the arguments of this member."""

    error: Exception


class Unanswered(NamedTuple):
    """Postgres did not answer."""


Answer: TypeAlias = Returned | Raised | Unanswered


class GroupCommit:
    """Runs a statement, which returns an id or nothing, for all callers that arrive while one connects.

    The first caller leads: once it has a connection, it runs the statement for every caller present, and
    passes on the outcome. No caller waits for others to arrive. The more there are, the less each one costs.

    If Postgres rejects one member's arguments, each member is stored in a transaction of its own, on the same
    connection and in the time that is left. So no caller gets an error for another's arguments.

    After a group that took more than SLOW_SHARE of the time, the next ones are smaller: a Postgres that is
    slow for each row gets no more rows at a time than it can finish. One whose commits alone take so long
    gets them one at a time, as it would without groups.
    """

    def __init__(
        self,
        pool: Pool,
        statement: str,
        *,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._statement = statement
        self._seconds = seconds
        self._clock = clock
        self._largest_now = LARGEST_GROUP
        self._latest: _Group | None = None

    async def execute(self, arguments: Arguments) -> Ids:
        """Run the statement with *arguments*; return the ids that it returned for the whole group.

        Raises PostgresUnavailable, and whatever the statement raises for these arguments.
        """
        group = self._latest
        if group is not None and self._may_grow(group):
            self._pool.take_place()
            answer = group.add(arguments)
        else:
            group = self._latest = _Group(self._clock())
            answer = group.add(arguments)
            await self._lead(group)
        match await answer:
            case Returned(ids):
                return ids
            case Raised(error):
                raise error
            case Unanswered():
                raise PostgresUnavailable.counted()

    def _may_grow(self, group: "_Group") -> bool:
        return (
            group.is_gathering
            and len(group.members) < self._largest_now
            and self._clock() - group.began < self._seconds * GATHERING_SHARE
        )

    async def _lead(self, group: "_Group") -> None:
        try:
            async with loans.connection(self._pool, seconds=self._seconds) as connection:
                await asyncio.sleep(0)  # Lets callers of the same turn of the event loop join.
                self._close(group)
                present = [member for member in group.members if not member.answer.done()]
                await self._serve(connection, present, until=group.began + self._seconds)
        except PostgresUnavailable:
            if not group.members[0].answer.done():
                raise
        finally:
            self._close(group)
            for member in group.members:
                member.settle(Unanswered())  # unless it has an answer already

    def _close(self, group: "_Group") -> None:
        """Let no one else join, and free the followers' places in the queue."""
        if group.is_gathering:
            group.is_gathering = False
            self._pool.leave_places(len(group.members) - 1)

    async def _serve(self, connection: Connection, members: Sequence["_Member"], *, until: float) -> None:
        """Run the statement for all members, or one by one if Postgres rejects the arguments of any."""
        try:
            ids = await self._run(connection, [member.arguments for member in members], until=until)
        except Exception as error:
            if len(members) == 1 or is_outage(error):
                raise
            await self._serve_each(connection, members, until=until)
        else:
            answer = Returned(ids)
            for member in members:
                member.settle(answer)

    async def _serve_each(
        self, connection: Connection, members: Sequence["_Member"], *, until: float
    ) -> None:
        is_usable = True
        for member in members:
            try:
                member.settle(Returned(await self._run(connection, [member.arguments], until=until)))
            except Exception as error:
                if is_outage(error):
                    raise
                member.settle(Raised(error))
                is_usable = is_usable and is_harmless(error)
        if not is_usable:
            connection.terminate()

    async def _run(self, connection: Connection, group: Sequence[Arguments], *, until: float) -> Ids:
        began = self._clock()
        try:
            # With asyncpg's own timeout: while Postgres reads no more input, cancellation would not end this.
            rows = await connection.fetchmany(self._statement, group, timeout=until - began)
        finally:
            if self._clock() - began < self._seconds * SLOW_SHARE:
                self._largest_now = min(self._largest_now + 1, LARGEST_GROUP)
            elif len(group) > 1:
                self._largest_now = len(group) // 2
        return {row[0] for row in rows}


class _Member:
    """A caller: its arguments, and the answer it waits for."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        # Errors are results, too: asyncio would log an exception that is never retrieved, values and all.
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def settle(self, answer: Answer) -> None:
        """Give the answer; only the first counts."""
        if not self.answer.done():
            self.answer.set_result(answer)


class _Group:
    """A leader, the first member, and its followers."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.is_gathering = True
        self.members: list[_Member] = []

    def add(self, arguments: Arguments) -> "asyncio.Future[Answer]":
        """Add a member; return its answer to come."""
        self.members.append(_Member(arguments))
        return self.members[-1].answer
