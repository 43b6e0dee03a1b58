"""The listener receives NOTIFY, and notices the loss of its connection."""

import asyncio
from functools import partial

from service.outbox import lanes
from tests.harness.databases import is_gone
from tests.harness.in_process import running
from tests.harness.waiting import eventually
from tests.worker.conftest import settings_with
from worker.relay import listener

LISTENERS = """
    SELECT array_agg(pid)
      FROM pg_stat_activity
     WHERE datname = current_database()
       AND pid <> pg_backend_pid()
       AND application_name <> 'calculation-requests'
"""


async def is_woken(database, woken: asyncio.Event) -> bool:
    await lanes.notify(database)
    await asyncio.sleep(0.01)
    return woken.is_set()


async def test_killed_connection_is_replaced_at_once(worker_settings, database):
    woken = asyncio.Event()

    async with running(partial(listener.run, worker_settings, woken)):
        await eventually(lambda: is_woken(database, woken))
        (killed,) = await database.fetchval(LISTENERS)
        await database.execute("SELECT pg_terminate_backend($1)", killed)
        await eventually(partial(other_listeners, database, killed))
        woken.clear()
        await eventually(lambda: is_woken(database, woken))


async def other_listeners(database, killed: int) -> list[int]:
    return [process for process in await database.fetchval(LISTENERS) or [] if process != killed]


async def test_connection_that_goes_silent_is_replaced(worker_settings, link, database, monkeypatch):
    monkeypatch.setattr(listener, "_CHECK_SECONDS", 0.1)
    settings = settings_with(worker_settings, database_url=link.url, database_timeout_seconds=0.5)
    woken = asyncio.Event()

    async with running(partial(listener.run, settings, woken)):
        await eventually(lambda: is_woken(database, woken))
        silent = set(await database.fetchval(LISTENERS))  # two, if a busy machine was slow
        link.hold()
        await eventually(lambda: link.connections >= 3)
        woken.clear()
        link.resume()
        await eventually(lambda: is_woken(database, woken))
        assert set(await database.fetchval(LISTENERS)) - silent


async def test_stopped_listener_closes_its_connection(worker_settings, database):
    async with running(partial(listener.run, worker_settings, asyncio.Event())):
        (process,) = await eventually(partial(other_listeners, database, 0))

    await eventually(lambda: is_gone(database, process))
