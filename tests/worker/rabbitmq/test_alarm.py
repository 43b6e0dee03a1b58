"""During the broker's alarm the relay waits, is not ready, and counts no attempt."""

import asyncio

import pytest

from tests.harness.in_process import running
from tests.harness.metrics import value
from tests.harness.scripted_broker import ScriptedBroker
from tests.harness.waiting import eventually
from tests.worker.conftest import obstacle, passes, settings_with, store
from worker.relay.loop import Relay


@pytest.fixture
async def broker():
    async with ScriptedBroker() as scripted:
        yield scripted


@pytest.fixture
def relay(worker_settings, broker, pool):
    settings = settings_with(worker_settings, amqp_url=broker.url, broker_timeout_seconds=0.5)
    return Relay(settings, pool, asyncio.Event())


async def is_blocked(relay: Relay) -> bool:
    return await obstacle(relay.check) == "RabbitMQ blocks publishers"


async def test_relay_publishes_nothing_during_an_alarm_and_goes_on_at_its_end(relay, broker, database):
    async with running(relay.run):
        await eventually(lambda: passes(relay.check))
        broker.raise_alarm()
        first = await store(database)
        await eventually(lambda: is_blocked(relay))
        gauge = value("broker_blocked")
        second = await store(database)
        connections = broker.connections
        await eventually(lambda: broker.connections >= connections + 3)
        was_blocked = await is_blocked(relay)
        held = await database.fetchval("SELECT count(*) FROM outbox_held")
        broker.clear_alarm()
        await eventually(lambda: passes(relay.check))
        await eventually(lambda: len(set(broker.taken)) == 2)

    assert (gauge, was_blocked, held) == (1, True, 0)
    assert set(broker.taken) == {f"{request.uuid}.request.created.1" for request in (first, second)}
    assert broker.taken.count(f"{second.uuid}.request.created.1") == 1
    assert value("broker_blocked") == 0


async def test_relay_stops_during_an_alarm(relay, broker):
    broker.raise_alarm()

    async with asyncio.timeout(30), running(relay.run):
        await eventually(lambda: is_blocked(relay))
