"""The listener receives NOTIFY, and notices the loss of its connection."""

import asyncio
from functools import partial

from service.outbox import waking
from tests.harness.databases import is_gone
from tests.harness.in_process import running
from tests.harness.waiting import eventually
from worker.relay import listener


async def listeners(database) -> set[int]:
    """Return the processes of Postgres that serve a listener."""
    rows = await database.fetch(
        """
        SELECT pid
          FROM pg_stat_activity
         WHERE datname = current_database()
           AND pid <> pg_backend_pid()
           AND application_name <> 'calculation-requests'
        """
    )
    return {row["pid"] for row in rows}


async def is_woken(database, woken: asyncio.Event) -> bool:
    await waking.notify(database)
    await asyncio.sleep(0.01)
    return woken.is_set()


async def test_killed_connection_is_replaced_at_once(worker_settings, database):
    woken = asyncio.Event()

    async with running(partial(listener.run, worker_settings, woken)):
        await eventually(lambda: is_woken(database, woken))
        (killed,) = await listeners(database)
        await database.execute("SELECT pg_terminate_backend($1)", killed)
        await eventually(lambda: is_gone(database, killed))
        woken.clear()
        await eventually(lambda: is_woken(database, woken))
