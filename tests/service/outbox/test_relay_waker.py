"""Commits wake the relays by a NOTIFY that they share."""

import asyncio
import time

from service.outbox import waking
from service.outbox.waking import RelayWaker
from service.server.background import in_background
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_client
from tests.harness.metrics import rises


async def test_commits_during_the_pause_after_a_notify_share_the_next(pool, database, monkeypatch):
    monkeypatch.setattr(waking, "_PAUSE_SECONDS", 0.5)
    waker = RelayWaker(pool, seconds=5.0)
    arrived: asyncio.Queue[float] = asyncio.Queue()
    await database.add_listener(waking.CHANNEL, lambda *_: arrived.put_nowait(time.monotonic()))

    async with asyncio.timeout(60), in_background("relay_waker", waker.run):
        waker.wake()
        first = await arrived.get()
        for _ in range(20):
            waker.wake()
        second = await arrived.get()
        await asyncio.sleep(1.0)  # another pause, and more

    assert second - first >= 0.4
    assert arrived.empty()


async def test_create_succeeds_while_postgres_refuses_each_notify(database, service_settings, issuer):
    """As it does while others fill its queue for NOTIFY. Here a function of the same name refuses."""
    name = await database.fetchval("SELECT current_database()")
    await database.execute(
        f"""
        CREATE FUNCTION public.pg_notify(text, text) RETURNS void LANGUAGE plpgsql
            AS $$ BEGIN RAISE program_limit_exceeded; END $$;
        ALTER DATABASE "{name}" SET search_path = public, pg_catalog
        """
    )
    async with api_client(service_settings, issuer.token()) as client:
        with rises("background_failures_total", by=0, work="relay_waker"):
            answers = [(await client.post("/v1/request", json=A_REQUEST)).status_code for _ in range(5)]
            await asyncio.sleep(0.1)  # for the NOTIFY that creates share

    assert answers == [200] * 5
