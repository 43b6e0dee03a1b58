"""The relay loses no event, keeps the order within a request, and counts no attempt during an outage."""

import asyncio

import pytest

from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from tests.harness.in_process import running
from tests.harness.metrics import value
from tests.harness.scripted_broker import ScriptedBroker
from tests.harness.waiting import eventually
from tests.worker.conftest import (
    announce_next,
    obstacle,
    open_publisher,
    passes,
    settings_with,
    store,
    take_ids,
)
from tests.worker.relay.conftest import id_of
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BrokerUnavailable
from worker.relay import loop, pointers
from worker.relay.loop import Relay

# The end of a publish to the exchange for all teams: exchange, routing key, mandatory.
_TO_ALL_TEAMS = b"calculation-requests\x0frequest.created\x01\xce"


async def test_window_is_no_larger_than_the_batch_size(relay_once, database, tap, monkeypatch):
    monkeypatch.setattr(loop, "_BATCH_SIZE", 2)
    requests = [await store(database) for _ in range(5)]

    passes_made = [await relay_once() for _ in range(4)]

    assert passes_made == [2, 2, 1, 0]
    assert await take_ids(tap) == [id_of(request) for request in requests]


async def test_event_committed_late_is_not_passed_over(relay_once, database, other_connection, tap):
    async with other_connection.transaction():
        late = await store(other_connection)
        early = await store(database)
        await relay_once()
    await relay_once()

    assert await take_ids(tap) == [id_of(early), id_of(late)]


async def test_event_that_another_relay_has_locked_is_left_to_it_with_the_later_events_of_its_request(
    relay_once, database, stored_request, tap
):
    await announce_next(database, stored_request.id)

    async with database.transaction():
        [locked] = await pointers.lock(database, pending=9, held=9)
        assert locked.event_id == id_of(stored_request)
        other = await store(database)
        moved_meanwhile = await relay_once()
    moved_afterwards = [await relay_once() for _ in range(3)]

    assert (moved_meanwhile, moved_afterwards) == (0, [2, 1, 0])
    ids = await take_ids(tap)
    assert ids[:2] == [id_of(stored_request), id_of(other)]


async def test_events_stay_locked_while_a_publish_takes_longer_than_other_transactions_may_be_silent(
    relay, linked_publisher, broker_link, stored_request
):
    broker_link.hold_before(id_of(stored_request).encode())
    relaying = asyncio.create_task(relay.relay_due(linked_publisher))
    await eventually(broker_link.marker_reached.is_set)

    await asyncio.sleep(connections.SILENCE_SECONDS + 0.5)
    broker_link.resume()

    assert await relaying == 1


async def test_outage_settles_the_confirmed_events_alone(worker_settings, pool, broker_link, database):
    await store(database)
    unconfirmed = await store(database)
    settings = settings_with(worker_settings, amqp_url=broker_link.url, broker_timeout_seconds=1.0)

    relay = Relay(settings, pool, asyncio.Event())

    async with open_publisher(settings) as publisher:
        broker_link.hold_before(id_of(unconfirmed).encode())
        broker_link.stop_listening()
        with pytest.raises(BrokerUnavailable):
            await relay.relay_due(publisher)
        broker_link.resume()

    left = await database.fetch("SELECT request_id, next_attempt_at FROM outbox")
    assert left == [(unconfirmed.id, None)]


async def test_queue_that_blocks_the_channel_holds_back_its_events_and_no_email(
    worker_settings, broker_link, pool, database, channel, tap
):
    """As RabbitMQ does while a bound quorum queue has no majority: see `_publish` in loop.py."""
    requests = [await store(database) for _ in range(3)]
    settings = settings_with(worker_settings, amqp_url=broker_link.url, broker_timeout_seconds=1.0)
    relay = Relay(settings, pool, asyncio.Event())
    events = {id_of(request) for request in requests}

    broker_link.hold_before(_TO_ALL_TEAMS)
    async with running(relay.run):
        await eventually(lambda: database.fetchval("SELECT bool_and(attempts > 0) FROM outbox"))
        is_ready = await passes(relay.check)
        held = await database.fetch("SELECT last_error FROM outbox")
        broker_link.resume()
        await eventually(lambda: database.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))

    assert is_ready
    assert [row["last_error"].partition(":")[0] for row in held] == ["not confirmed"] * len(held)
    assert set(await take_ids(await channel.get_queue(topology.NOTIFICATIONS.name))) == events
    assert set(await take_ids(tap)) == events


async def test_window_that_a_queue_blocks_is_the_last_on_its_channel(
    worker_settings, broker_link, pool, database, monkeypatch
):
    """Otherwise the numbers of later messages could be wrong, and events could be deleted unpublished."""
    monkeypatch.setattr(loop, "_BATCH_SIZE", 2)
    for _ in range(3):
        await store(database)
    settings = settings_with(worker_settings, amqp_url=broker_link.url, broker_timeout_seconds=1.0)
    relay = Relay(settings, pool, asyncio.Event())

    async with open_publisher(settings) as publisher:
        broker_link.hold_before(_TO_ALL_TEAMS)
        began = await database.fetchval("SELECT now()")
        held = await relay.relay_due(publisher)
        is_usable = publisher.is_usable
        broker_link.resume()

    assert not is_usable
    assert held == 2
    # The pause of a second follows the publish, which took a second.
    assert await database.fetchval("SELECT min(next_attempt_at) - $1 > '1.5 s' FROM outbox", began)
    assert await database.fetchval("SELECT count(*) FROM outbox WHERE next_attempt_at IS NULL") == 1


async def test_outage_of_postgres_keeps_the_connection_to_rabbitmq(
    worker_settings, broker_link, link, linked_pool, database, tap, logs
):
    """Otherwise the relay would log in to RabbitMQ again and again, and its checks would blame RabbitMQ."""
    settings = settings_with(worker_settings, amqp_url=broker_link.url)
    relay = Relay(settings, linked_pool, asyncio.Event())
    async with running(relay.run):
        await eventually(lambda: passes(relay.check))
        await link.refuse()
        await eventually(lambda: sum(line["event"] == "relay_paused" for line in logs) == 3)
        is_ready = await passes(relay.check)
        link.admit()
        request = await store(database)
        await eventually(lambda: database.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))

    assert is_ready
    assert broker_link.connections == 1
    assert await take_ids(tap) == [id_of(request)]


async def test_channel_is_not_used_again_after_postgres_has_interrupted_a_publish(
    worker_settings, broker_link, link, linked_pool, database, stored_request
):
    """Some of its messages may be unsent, although aiormq has numbered them."""
    settings = settings_with(worker_settings, amqp_url=broker_link.url, broker_timeout_seconds=60.0)
    broker_link.hold_before(id_of(stored_request).encode())

    async with running(Relay(settings, linked_pool, asyncio.Event()).run):
        await eventually(broker_link.marker_reached.is_set)
        await link.cut()
        await eventually(lambda: broker_link.connections == 2)
        broker_link.resume()
        await eventually(lambda: database.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))


async def test_nothing_is_published_from_a_read_only_postgres(relay_once, database, tap, stored_request):
    """It could settle nothing, and every pass would publish the same events again."""
    name = await database.fetchval("SELECT quote_ident(current_database())")
    await database.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")

    with pytest.raises(PostgresUnavailable):
        await relay_once()

    assert await take_ids(tap) == []
    assert await database.fetchval("SELECT request_id FROM outbox") == stored_request.id


@pytest.fixture
async def broker():
    async with ScriptedBroker() as scripted:
        yield scripted


@pytest.fixture
def blockable_relay(worker_settings, broker, pool):
    settings = settings_with(worker_settings, amqp_url=broker.url, broker_timeout_seconds=0.5)
    return Relay(settings, pool, asyncio.Event())


async def is_blocked(relay: Relay) -> bool:
    return await obstacle(relay.check) == "RabbitMQ blocks publishers"


async def test_relay_publishes_nothing_during_an_alarm_and_goes_on_at_its_end(
    blockable_relay, broker, database
):
    async with running(blockable_relay.run):
        await eventually(lambda: passes(blockable_relay.check))
        broker.raise_alarm()
        first = await store(database)
        await eventually(lambda: is_blocked(blockable_relay))
        gauge = value("broker_blocked")
        second = await store(database)
        connections = broker.connections
        await eventually(lambda: broker.connections >= connections + 3)
        was_blocked = await is_blocked(blockable_relay)
        held = await database.fetchval("SELECT count(*) FROM outbox WHERE next_attempt_at IS NOT NULL")
        broker.clear_alarm()
        await eventually(lambda: passes(blockable_relay.check))
        await eventually(lambda: len(set(broker.taken)) == 2)

    assert (gauge, was_blocked, held) == (1, True, 0)
    assert set(broker.taken) == {id_of(first), id_of(second)}
    assert broker.taken.count(id_of(second)) == 1
    assert value("broker_blocked") == 0


async def test_relay_stops_during_an_alarm(blockable_relay, broker):
    broker.raise_alarm()

    async with asyncio.timeout(30), running(blockable_relay.run):
        await eventually(lambda: is_blocked(blockable_relay))
