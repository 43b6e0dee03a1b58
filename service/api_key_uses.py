"""When each API key was last used: noted in memory, written now and then, never while a caller waits."""

import asyncio
from contextlib import suppress

from service import conveyancers, postgres
from service.postgres import Pool, PostgresUnavailable


class ApiKeyUses:
    """The prefixes of the keys used since the last writing. A crash forgets them: nobody relies on them."""

    def __init__(self, pool: Pool, *, interval_seconds: float, timeout_seconds: float) -> None:
        self._pool = pool
        self._interval_seconds = interval_seconds
        self._timeout_seconds = timeout_seconds
        self._used: set[str] = set()

    def note(self, prefix: str) -> None:
        """Say that this valid key was used; returns at once."""
        self._used.add(prefix)

    async def run(self) -> None:
        """Write at every interval, and once more when cancelled."""
        try:
            while True:
                await asyncio.sleep(self._interval_seconds)
                await self._write()
        finally:
            await self._write()

    async def _write(self) -> None:
        """Write all uses in one statement. What Postgres does not take now, it is given next time."""
        used = frozenset(self._used)
        if not used:
            return
        with suppress(PostgresUnavailable):
            async with postgres.connection(self._pool, seconds=self._timeout_seconds) as connection:
                await conveyancers.record_api_key_uses(connection, used)
            self._used -= used
