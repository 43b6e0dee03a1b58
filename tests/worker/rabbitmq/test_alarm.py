"""During the broker's alarm the relay waits, is not ready, and counts no attempt."""

import asyncio

import pytest
from structlog.testing import capture_logs

from tests.harness.databases import has_waiting_statement
from tests.harness.in_process import running
from tests.harness.scripted_broker import ScriptedBroker
from tests.harness.waiting import eventually
from tests.worker.conftest import obstacle, passes, settings_with, store
from worker.relay.loop import Relay

_TIMEOUT_SECONDS = 0.5


@pytest.fixture
async def broker():
    async with ScriptedBroker() as scripted:
        yield scripted


@pytest.fixture
def relay(worker_settings, broker, pool):
    settings = settings_with(worker_settings, amqp_url=broker.url, broker_timeout_seconds=_TIMEOUT_SECONDS)
    return Relay(settings, pool, asyncio.Event())


async def is_blocked(relay: Relay) -> bool:
    return await obstacle(relay.check) == "RabbitMQ blocks publishers"


async def test_relay_reads_nothing_during_an_alarm_and_goes_on_at_its_end(relay, broker, database):
    with capture_logs() as logs:
        async with running(relay.run):
            await eventually(lambda: passes(relay.check))
            broker.raise_alarm()
            first = await store(database)
            await eventually(lambda: broker.connections == 2)  # It gave up the window and reconnected.
            await eventually(lambda: is_blocked(relay))
            second = await store(database)
            async with database.transaction():
                await database.execute("LOCK TABLE outbox")
                await asyncio.sleep(1.2 * _TIMEOUT_SECONDS)
                reads = await has_waiting_statement(database)
            held = await database.fetchval("SELECT count(*) FROM outbox_held")
            broker.clear_alarm()
            await eventually(lambda: passes(relay.check))
            await eventually(lambda: len(set(broker.taken)) == 2)

    assert (reads, held) == (False, 0)
    assert set(broker.taken) == {f"{request.uuid}.request.created.1" for request in (first, second)}
    assert broker.connections == 2
    alarms = [line["event"] for line in logs if line["event"].startswith("broker_")]
    assert alarms == ["broker_blocked"] * 2 + ["broker_unblocked"]  # one connection after the other


async def test_relay_that_connects_during_an_alarm_keeps_its_connection_to_the_end(relay, broker, database):
    await store(database)
    broker.raise_alarm()

    async with running(relay.run):
        await eventually(lambda: is_blocked(relay))
        await asyncio.sleep(1.2 * _TIMEOUT_SECONDS)
        was_blocked = await is_blocked(relay)
        broker.clear_alarm()
        await eventually(lambda: broker.taken)

    assert was_blocked
    assert broker.connections == 1


async def test_relay_stops_during_an_alarm_and_is_not_blocked_on_its_next_connection(relay, broker):
    broker.raise_alarm()

    async with asyncio.timeout(30), running(relay.run):
        await eventually(lambda: is_blocked(relay))
    broker.clear_alarm()
    async with running(relay.run):
        await eventually(lambda: passes(relay.check))
