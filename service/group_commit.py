"""Group commit: who runs the same statement at the same time shares one round trip and one transaction."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

from service import postgres
from service.postgres import Connection, Pool, PostgresUnavailable

LARGEST_GROUP = 32
SLOW_SHARE = 1 / 8  # of the time for the database: after a group that took longer, the next are smaller

Arguments: TypeAlias = Sequence[Any]
Ids: TypeAlias = set[Any]


class GroupCommit:
    """Runs a statement, which returns an id or nothing, for whoever comes while another gets a connection.

    The first to come is the leader: once it has a connection, it runs the statement for all who are there,
    and tells them. Nobody waits for others to come; but the more there are, the less each of them costs.
    """

    def __init__(self, pool: Pool, statement: str, *, seconds: float) -> None:
        self._pool = pool
        self._statement = statement
        self._seconds = seconds
        self._most = LARGEST_GROUP
        self._latest: _Group | None = None

    async def execute(self, arguments: Arguments) -> Ids:
        """Run the statement with *arguments*, and return the ids that it returned for the whole group.

        Raises PostgresUnavailable; and whatever the statement raises for these arguments, of which the others
        hear nothing.
        """
        group = self._latest
        if group is not None and group.is_gathering and len(group) < self._most:
            ids = await group.join(arguments)
        else:
            group = self._latest = _Group(self._pool)
            ids = await self._lead(group, arguments)
        return await self._execute_alone(arguments) if ids is None else ids

    async def _lead(self, group: "_Group", arguments: Arguments) -> Ids | None:
        """Run the statement for a group. None when somebody's arguments were refused: each tries alone."""
        try:
            async with postgres.connection(self._pool, seconds=self._seconds) as connection:
                await asyncio.sleep(0)  # Who came in the same turn of the event loop comes along.
                ids = await self._execute_all(connection, [arguments, *group.depart()])
            group.tell(ids)
        except PostgresUnavailable:
            raise
        except Exception:
            if len(group) == 1:
                raise
            group.tell(None)
            return None
        finally:
            group.depart()
            group.turn_away()  # those who have heard nothing
        return ids

    async def _execute_alone(self, arguments: Arguments) -> Ids:
        async with postgres.connection(self._pool, seconds=self._seconds) as connection:
            return await self._execute_all(connection, [arguments])

    async def _execute_all(self, connection: Connection, group: Sequence[Arguments]) -> Ids:
        began = time.monotonic()
        try:
            # While Postgres takes in no more, a cancellation would not end this; asyncpg's own timeout does.
            rows = await connection.fetchmany(self._statement, group, timeout=self._seconds)
        finally:
            is_slow = time.monotonic() - began > self._seconds * SLOW_SHARE
            self._most = max(1, len(group) // 2) if is_slow else min(self._most + 1, LARGEST_GROUP)
        return {row[0] for row in rows}


class _Group:
    """A leader, who is not listed, and its followers: each with its arguments and what it waits for."""

    def __init__(self, pool: Pool) -> None:
        self.is_gathering = True
        self._pool = pool
        self._followers: list[tuple[Arguments, asyncio.Future[Ids | None]]] = []

    def __len__(self) -> int:
        return 1 + len(self._followers)

    async def join(self, arguments: Arguments) -> Ids | None:
        """Wait for what the leader tells. Raises PostgresUnavailable, also when too many wait already."""
        self._pool.take_place()
        outcome: asyncio.Future[Ids | None] = asyncio.get_running_loop().create_future()
        self._followers.append((arguments, outcome))
        return await outcome

    def depart(self) -> list[Arguments]:
        """Take nobody in any more, and return the followers' arguments."""
        if self.is_gathering:
            self.is_gathering = False
            self._pool.leave_places(len(self._followers))
        return [arguments for arguments, outcome in self._followers if not outcome.done()]

    def tell(self, ids: Ids | None) -> None:
        """Tell the followers what the statement returned, or that they have to try alone."""
        for _, outcome in self._followers:
            if not outcome.done():
                outcome.set_result(ids)

    def turn_away(self) -> None:
        """Tell the followers that Postgres cannot be had."""
        for _, outcome in self._followers:
            if not outcome.done():
                outcome.set_exception(postgres.unavailable())
