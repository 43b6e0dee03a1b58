"""The relay loses no event, keeps the order, counts no attempt in an outage, and rests until it is woken."""

import asyncio
from functools import partial

import pytest

from service.outbox import waking
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from tests.harness.databases import is_gone
from tests.harness.in_process import running
from tests.harness.metrics import value
from tests.harness.scripted_broker import ScriptedBroker
from tests.harness.waiting import eventually
from tests.worker.conftest import announce_next, open_publisher, passes, settings_with, store, take_ids
from tests.worker.steps import id_of
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BrokerUnavailable
from worker.relay import listener, loop, pointers
from worker.relay.loop import Relay

# The end of a publish to the exchange for all teams: exchange, routing key, mandatory.
_TO_ALL_TEAMS = b"calculation-requests\x0frequest.created\x01\xce"


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
        moved = [await relay_once()]
    moved += [await relay_once() for _ in range(3)]

    assert moved == [0, 2, 1, 0]
    assert (await take_ids(tap))[:2] == [id_of(stored_request), id_of(other)]


async def test_events_stay_locked_while_a_publish_takes_longer_than_other_transactions_may_be_silent(
    relay, worker_settings, broker_link, stored_request
):
    settings = settings_with(worker_settings, amqp_url=broker_link.url, broker_timeout_seconds=30.0)
    broker_link.hold_before(id_of(stored_request).encode())

    async with open_publisher(settings) as publisher:
        relaying = asyncio.create_task(relay.relay_due(publisher))
        await eventually(broker_link.marker_reached.is_set)
        await asyncio.sleep(connections.SILENCE_SECONDS + 0.5)
        broker_link.resume()
        assert await relaying == 1


async def test_outage_settles_the_confirmed_events_alone(worker_settings, pool, broker_link, database):
    _, unconfirmed = [await store(database) for _ in range(2)]
    settings = settings_with(worker_settings, amqp_url=broker_link.url, broker_timeout_seconds=1.0)

    async with open_publisher(settings) as publisher:
        broker_link.hold_before(id_of(unconfirmed).encode())
        broker_link.stop_listening()
        with pytest.raises(BrokerUnavailable):
            await Relay(settings, pool, asyncio.Event()).relay_due(publisher)
        broker_link.resume()

    left = await database.fetch("SELECT request_id, next_attempt_at FROM outbox")
    assert left == [(unconfirmed.id, None)]


async def test_queue_that_blocks_the_channel_holds_back_its_events_and_no_email(
    worker_settings, broker_link, pool, database, channel, tap
):
    """As RabbitMQ does while a bound quorum queue has no majority: see `_publish` in loop.py."""
    events = {id_of(await store(database)) for _ in range(3)}
    settings = settings_with(worker_settings, amqp_url=broker_link.url, broker_timeout_seconds=1.0)
    relay = Relay(settings, pool, asyncio.Event())

    broker_link.hold_before(_TO_ALL_TEAMS)
    async with running(relay.run):
        await eventually(lambda: database.fetchval("SELECT bool_and(attempts > 0) FROM outbox"))
        assert await passes(relay.check)
        held = await database.fetch("SELECT DISTINCT split_part(last_error, ':', 1) FROM outbox")
        broker_link.resume()
        await eventually(lambda: database.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))

    assert held == [("not confirmed",)]
    for queue in (await channel.get_queue(topology.NOTIFICATIONS.name), tap):
        assert set(await take_ids(queue)) == events


async def test_window_has_the_oldest_events_and_its_pause_begins_after_a_publish_that_a_queue_blocks(
    worker_settings, broker_link, pool, database, monkeypatch
):
    monkeypatch.setattr(loop, "_BATCH_SIZE", 2)
    for _ in range(3):
        await store(database)
    settings = settings_with(worker_settings, amqp_url=broker_link.url, broker_timeout_seconds=1.0)

    async with open_publisher(settings) as publisher:
        broker_link.hold_before(_TO_ALL_TEAMS)
        began = await database.fetchval("SELECT now()")
        assert await Relay(settings, pool, asyncio.Event()).relay_due(publisher) == 2
        assert not publisher.is_usable
        broker_link.resume()

    # The pause of a second follows the publish, which took a second.
    is_late = "SELECT next_attempt_at - $1 > '1.5 s'::interval FROM outbox ORDER BY created_at"
    assert await database.fetch(is_late, began) == [(True,), (True,), (None,)]


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
        assert await passes(relay.check)
        link.admit()
        request = await store(database)
        await eventually(lambda: database.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))

    assert (broker_link.connections, await take_ids(tap)) == (1, [id_of(request)])


async def test_channel_is_not_used_again_after_postgres_has_interrupted_a_publish(
    worker_settings, broker_link, link, linked_pool, database, stored_request
):
    """Some of its messages may be unsent, although aiormq has numbered them."""
    settings = settings_with(worker_settings, amqp_url=broker_link.url, broker_timeout_seconds=300.0)
    broker_link.hold_before(id_of(stored_request).encode())

    async with running(Relay(settings, linked_pool, asyncio.Event()).run):
        await eventually(broker_link.marker_reached.is_set)
        await link.cut()
        # RabbitMQ itself would close the silent connection after some heartbeats.
        await eventually(lambda: broker_link.connections == 2, seconds=10.0)
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


async def test_relay_publishes_nothing_during_an_alarm_goes_on_at_its_end_and_stops_during_another(
    worker_settings, pool, database
):
    async with asyncio.timeout(60), ScriptedBroker() as broker:
        settings = settings_with(worker_settings, amqp_url=broker.url, broker_timeout_seconds=0.5)
        relay = Relay(settings, pool, asyncio.Event())

        async def is_blocked() -> bool:
            return value("broker_blocked") == 1 and not await passes(relay.check)

        async with running(relay.run):
            await eventually(lambda: passes(relay.check))
            broker.reading.clear()
            first = await store(database)
            await eventually(is_blocked)
            second = await store(database)
            connections = broker.connections
            await eventually(lambda: broker.connections >= connections + 3)
            await eventually(is_blocked)  # On a busy machine, an attempt may end before the alarm shows.
            held = await database.fetchval("SELECT count(*) FROM outbox WHERE next_attempt_at IS NOT NULL")
            broker.reading.set()
            await eventually(lambda: passes(relay.check))
            assert value("broker_blocked") == 0
            await eventually(lambda: len(set(broker.taken)) == 2)
            broker.reading.clear()
            await store(database)
            await eventually(is_blocked)

    assert held == 0
    assert set(broker.taken) == {id_of(first), id_of(second)}
    assert broker.taken.count(id_of(second)) == 1


async def test_relay_rests_until_it_is_woken(database, worker_settings, linked_pool, statements):
    """It makes one pass that finds nothing at first, and after each pass that has found something."""
    woken = asyncio.Event()
    relay = Relay(settings_with(worker_settings, relay_poll_seconds=3600.0), linked_pool, woken)

    def passes_made() -> int:
        return sum("FOR UPDATE OF outbox" in each for each in statements.executed)

    async with running(relay.run):
        await eventually(lambda: passes_made() == 1)
        await store(database)
        woken.set()
        await eventually(lambda: passes_made() == 3)
        woken.set()
        await eventually(lambda: passes_made() == 4)


async def listeners(database) -> set[int]:
    """Return the processes of Postgres that serve a listener."""
    rows = await database.fetch(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        "   AND application_name <> 'calculation-requests'"
    )
    return {row["pid"] for row in rows}


async def is_woken(database, woken: asyncio.Event) -> bool:
    await waking.notify(database)
    await asyncio.sleep(0.01)
    return woken.is_set()


async def test_listener_replaces_a_killed_connection_at_once_and_a_silent_one_soon_and_closes_its_own(
    worker_settings, link, database, monkeypatch
):
    settings = settings_with(worker_settings, database_url=link.url, database_timeout_seconds=0.5)
    woken = asyncio.Event()

    async with running(partial(listener.run, settings, woken)):
        await eventually(lambda: is_woken(database, woken))
        monkeypatch.setattr(listener, "_CHECK_SECONDS", 0.1)  # of the connections after this one
        for killed in await listeners(database):  # two, if a busy machine was slow
            await database.execute("SELECT pg_terminate_backend($1)", killed)
            await eventually(partial(is_gone, database, killed))
        woken.clear()
        await eventually(lambda: is_woken(database, woken), seconds=15.0)
        silent, connections_before = await listeners(database), link.connections
        link.hold()
        await eventually(lambda: link.connections >= connections_before + 2)
        woken.clear()
        link.resume()
        await eventually(lambda: is_woken(database, woken))
        last = await listeners(database)

    assert last - silent
    for each in last:
        await eventually(partial(is_gone, database, each))
