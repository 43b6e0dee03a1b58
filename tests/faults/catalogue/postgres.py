"""Faults of Postgres itself: killed, read-only, demoted, backends terminated, tables locked."""

import asyncio
import time
from functools import partial

from service.postgres.pool import Connection
from tests.faults.catalogue.fault import fault
from tests.faults.verdict.records import Interval
from tests.faults.world.world import HARNESS, World
from tests.harness import databases
from tests.harness.waiting import until

_PASS_SECONDS = 2.0  # after which a batch that had begun is done
_LOCKED_SECONDS = 4.0


@fault("backends terminated", "backends", "postgres", repeats=True)
async def terminate_backends(world: World) -> bool:
    terminated = 0
    end = time.monotonic() + world.chance.uniform(1.5, 4.0)
    while time.monotonic() < end:
        terminated += await world.on_postgres(partial(_terminate_some, world.chance.uniform(0.1, 0.6)))
        await asyncio.sleep(0.5)
    return terminated > 0


async def _terminate_some(share: float, connection: Connection) -> int:
    ended = await connection.fetch(
        """
        SELECT pg_terminate_backend(pid)
          FROM pg_stat_activity
         WHERE backend_type = 'client backend'
           AND application_name <> $1
           AND random() < $2
        """,
        HARNESS,
        share,
    )
    return len(ended)


@fault("Postgres killed", "postgres", "backends", repeats=True)
async def kill_postgres(world: World) -> bool:
    await world.servers.postgres.kill()
    await asyncio.sleep(world.some_seconds(1.5))
    is_down = not world.servers.postgres.is_up
    await world.servers.postgres.start()
    return is_down


@fault("Postgres read-only", "postgres", "backends", "postgres links", repeats=True)
async def make_postgres_read_only(world: World) -> bool:
    """No session can write for a while. All stay open."""
    reload_settings = "SELECT pg_reload_conf()"
    await _execute(world, "ALTER SYSTEM SET default_transaction_read_only = on", reload_settings)
    try:
        return await _wait_read_only(world)
    finally:
        await _execute(world, "ALTER SYSTEM RESET default_transaction_read_only", reload_settings)


@fault("Postgres demoted", "postgres", "backends", "postgres links", repeats=True)
async def demote_postgres(world: World) -> bool:
    """Sessions are cut; those opened during the fault can never write, only later ones can.

    As behind a proxy to the primary: that becomes a standby, and later the proxy leads to the new primary.
    """
    await _execute(world, "ALTER ROLE ALL SET default_transaction_read_only = on")
    await world.on_postgres(partial(_terminate_some, 1.0))
    try:
        return await _wait_read_only(world)
    finally:
        await _execute(world, "ALTER ROLE ALL RESET default_transaction_read_only")


async def _execute(world: World, *statements: str) -> None:
    async def execute(connection: Connection) -> None:
        for statement in statements:
            await connection.execute(statement)

    await world.on_postgres(execute)


async def _wait_read_only(world: World) -> bool:
    """Return whether a session with the usual settings could not write."""
    began = time.monotonic()
    try:
        await asyncio.sleep(_PASS_SECONDS + world.some_seconds(5.0))
        async with databases.connected(world.servers.postgres_url) as connection:
            return await connection.fetchval("SHOW default_transaction_read_only") == "on"
    finally:
        world.record.read_only.append(Interval(began, time.monotonic()))


async def _lock_table(world: World, *, table: str) -> bool:
    async def hold(connection: Connection) -> bool:
        async def is_waited_for() -> bool:
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = $1::regclass"
            return await connection.fetchval(waits, table) > 0

        async with connection.transaction():
            await connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            _, is_seen = await asyncio.gather(
                asyncio.sleep(_LOCKED_SECONDS), until(is_waited_for, seconds=_LOCKED_SECONDS)
            )
            return is_seen

    return await world.on_postgres(hold)


for _table in ("calculation_request", "outbox", "email"):
    fault(f"{_table} locked", "postgres", "backends", repeats=False)(partial(_lock_table, table=_table))
