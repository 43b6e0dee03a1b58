"""Commits wake the relays by a NOTIFY that they share."""

import asyncio

import pytest

from service.outbox import waking
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_client
from tests.harness.metrics import rises
from tests.worker.conftest import store


@pytest.mark.parametrize(("path", "body"), [("", A_REQUEST), ("/{uuid}/withdrawal", None)])
async def test_call_that_stores_an_event_wakes_the_relays(client, database, path, body):
    request, woken = await store(database), asyncio.Event()
    await database.add_listener(waking.CHANNEL, lambda *_: woken.set())

    await client.post(f"/v1/request{path}".format(uuid=request.uuid), json=body)

    await asyncio.wait_for(woken.wait(), 10)


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
