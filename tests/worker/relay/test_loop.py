"""The relay loses no event, keeps the order within a request, and charges no event for an outage."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import asyncpg
import msgspec
import pytest
from aio_pika.abc import AbstractIncomingMessage

from service.calculation_requests.model import CalculationRequest
from service.outbox.lanes import LANES, lane_of, notify, try_lock
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, open_pool
from tests.harness.databases import has_waiting_statement
from tests.harness.in_process import running
from tests.harness.waiting import eventually
from tests.worker.conftest import (
    announce_next,
    open_publisher,
    passes,
    settings_with,
    store,
    take_all,
    take_ids,
    with_pace,
)
from tests.worker.deliveries import calculate
from worker.rabbitmq.connection import BrokerUnavailable
from worker.relay import loop
from worker.relay.listener import Listener
from worker.relay.loop import Relay
from worker.relay.outbox_tables import LaneLost

LANE = 0

RelayOnce = Callable[[], Awaitable[int]]


async def into_one_lane(database: Connection) -> None:
    """Move all events of the outbox to one lane, so that they can share a window."""
    await database.execute("UPDATE outbox SET lane = $1", LANE)


async def waiting_events(database: Connection) -> int:
    """Return how many events are still to be delivered."""
    total: int = await database.fetchval("SELECT count(*) FROM undelivered_event")
    return total


async def is_empty(database: Connection) -> bool:
    return await waiting_events(database) == 0


def id_of(request: CalculationRequest, event_type: str = "request.created", sequence: int = 1) -> str:
    """Return the expected id of an event."""
    return f"{request.uuid}.{event_type}.{sequence}"


def in_order(messages: list[AbstractIncomingMessage]) -> dict[str, list[int]]:
    """Return the sequence numbers of each request in the order of arrival, without repeats."""
    sequences: dict[str, list[int]] = defaultdict(list)
    for message in messages:
        data = msgspec.json.decode(message.body)["data"]
        if data["sequence"] not in sequences[data["uuid"]]:
            sequences[data["uuid"]].append(data["sequence"])
    return sequences


@with_pace(_BATCH_SIZE=2)
async def test_window_is_no_larger_than_the_batch_size(relay_once, database, tap):
    requests = [await store(database) for _ in range(5)]
    await into_one_lane(database)

    passes_made = [await relay_once() for _ in range(4)]

    assert passes_made == [2, 2, 1, 0]
    assert await take_ids(tap) == [id_of(request) for request in requests]


async def test_event_without_a_queue_counts_as_delivered_unless_it_must_be_routed(
    relay_once, database, stored_request
):
    await relay_once()
    await calculate(database, stored_request.uuid, "calc-1")

    await relay_once()

    assert await is_empty(database)


@pytest.fixture
async def late_connection(database_url):
    """A connection with a transaction that is committed late."""
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


@pytest.mark.parametrize("others", [0, 1], ids=["idle", "busy"])
async def test_event_that_is_committed_late_is_not_passed_over(
    relay_once, database, late_connection, tap, others
):
    async with late_connection.transaction():
        late = await store(late_connection)
        early = [await store(database) for _ in range(others)]
        await database.execute("UPDATE outbox SET lane = $1", lane_of(late.id))
        for _ in range(8):
            await relay_once()
    await relay_once()

    assert await take_ids(tap) == [id_of(request) for request in (*early, late)]


async def test_event_whose_id_was_given_out_before_the_first_write_is_not_passed_over(
    relay_once, database, late_connection, stored_request
):
    """A transaction gets an id at its first write. Without one, relays cannot know that it is open."""
    await database.execute("SELECT pg_advisory_lock(1)")
    writing = asyncio.create_task(
        late_connection.execute(
            """
            INSERT INTO outbox (lane, request_id, type, sequence, payload)
            VALUES (0, $1, 'request.calculated', 2, convert_to(pg_advisory_xact_lock(1)::text, 'UTF8'))
            """,
            stored_request.id,
        )
    )
    await eventually(lambda: has_waiting_statement(database))

    for _ in range(8):
        await relay_once()
    await database.execute("SELECT pg_advisory_unlock(1)")
    await writing

    assert await relay_once() == 1


async def test_idle_lane_is_read_from_behind_the_deleted_events(relay, relay_once, database):
    """Otherwise, while a backup holds an old snapshot, every look would step over all of them."""
    for _ in range(3):
        await store(database)

    for _ in range(8):
        await relay_once()

    assert relay.marks.low_water == [4] * LANES


async def test_lanes_that_another_relay_has_locked_are_left_alone_and_the_others_relayed(
    relay_once, database, stored_request
):
    lane = lane_of(stored_request.id)
    while lane_of((other := await store(database)).id) == lane:
        await database.execute("DELETE FROM outbox WHERE request_id = $1", other.id)

    async with database.transaction():
        assert await try_lock(database, [lane]) == [lane]
        moved_meanwhile = await relay_once()
    moved_afterwards = await relay_once()

    assert (moved_meanwhile, moved_afterwards) == (1, 1)


async def test_two_relays_deliver_every_event_once_and_in_order(worker_settings, database, tap, monkeypatch):
    monkeypatch.setattr(loop, "_BATCH_SIZE", 7)
    requests = [await store(database) for _ in range(10)]
    async with AsyncExitStack() as resources:
        pools = [await resources.enter_async_context(open_pool(worker_settings)) for _ in range(2)]
        relays = [Relay(worker_settings, pool, asyncio.Event()) for pool in pools]

        async with running(*(relay.run for relay in relays)):
            for _ in range(20):
                for request in requests:
                    await announce_next(database, request.id)
            await eventually(lambda: is_empty(database))

    messages = await take_all(tap)
    assert len(messages) == 10 * 21
    assert in_order(messages) == {request.uuid: list(range(1, 22)) for request in requests}


async def test_outage_of_the_broker_charges_no_attempt_and_delivery_resumes_after_it(
    worker_settings, pool, broker_link, database, tap, stored_request
):
    relay = Relay(settings_with(worker_settings, amqp_url=broker_link.url), pool, asyncio.Event())
    await broker_link.refuse()

    async with running(relay.run):
        await eventually(lambda: broker_link.refused >= 3)
        was_ready = await passes(relay.check)
        held = await database.fetchval("SELECT count(*) FROM outbox_held")
        waiting = await waiting_events(database)
        broker_link.admit()
        await eventually(lambda: is_empty(database))
        is_ready = await passes(relay.check)

    assert (was_ready, held, waiting, is_ready) == (False, 0, 1, True)
    assert await take_ids(tap) == [id_of(stored_request)]


async def test_relay_keeps_working_after_an_outage_of_postgres(worker_settings, postgres_link, database, tap):
    settings = settings_with(worker_settings, database_url=postgres_link.url)
    async with open_pool(settings) as pool, running(Relay(settings, pool, asyncio.Event()).run):
        first = await store(database)
        await eventually(lambda: is_empty(database))
        await postgres_link.refuse()
        second = await store(database)
        await eventually(lambda: postgres_link.refused >= 3)
        postgres_link.admit()
        await eventually(lambda: is_empty(database))

    assert await take_ids(tap) == [id_of(first), id_of(second)]


@pytest.fixture
async def held_publisher(worker_settings, broker_link):
    """A publisher whose confirms are held until `broker_link.resume()`."""
    async with open_publisher(settings_with(worker_settings, amqp_url=broker_link.url)) as opened:
        broker_link.hold()
        yield opened
        broker_link.resume()


async def publishing_under_way(database: Connection) -> int | None:
    """Return the process of Postgres that serves a relay with a window which is not settled yet."""
    process: int | None = await database.fetchval(
        """
        SELECT pid
          FROM pg_stat_activity
         WHERE datname = current_database()
           AND state = 'idle in transaction'
           AND query LIKE '%AS must_wait%'
        """
    )
    return process


async def test_lane_is_kept_while_a_publish_takes_longer_than_other_transactions_may_be_silent(
    relay, held_publisher, broker_link, database
):
    await store(database)
    relaying = asyncio.create_task(relay.relay_due(held_publisher))
    await eventually(lambda: publishing_under_way(database))

    await asyncio.sleep(connections.SILENCE_SECONDS + 0.5)
    broker_link.resume()

    assert await relaying == 1


async def test_window_is_not_settled_after_the_connection_to_postgres_was_lost(
    relay, held_publisher, broker_link, database, publisher
):
    """The lane is another relay's then."""
    await store(database)
    relaying = asyncio.create_task(relay.relay_due(held_publisher))
    process = await eventually(lambda: publishing_under_way(database))

    await database.execute("SELECT pg_terminate_backend($1)", process)
    broker_link.resume()

    with pytest.raises(PostgresUnavailable):
        await relaying
    assert await relay.relay_due(publisher) == 1


async def test_row_deleted_by_another_process_is_a_lost_lane_and_nothing_is_settled(
    relay, held_publisher, broker_link, database
):
    kept, gone = await store(database), await store(database)
    await into_one_lane(database)
    relaying = asyncio.create_task(relay.relay_due(held_publisher))
    await eventually(lambda: publishing_under_way(database))

    await database.execute("DELETE FROM outbox WHERE request_id = $1", gone.id)
    broker_link.resume()
    with pytest.raises(LaneLost):
        await relaying

    assert await database.fetchval("SELECT request_id FROM outbox") == kept.id


async def test_events_confirmed_before_an_outage_are_settled_and_the_rest_stay(
    worker_settings, relay, broker_link, database
):
    confirmed, unconfirmed = await store(database), await store(database)
    await into_one_lane(database)
    settings = settings_with(worker_settings, amqp_url=broker_link.url, broker_timeout_seconds=1.0)

    async with open_publisher(settings) as publisher:
        broker_link.hold_before(id_of(unconfirmed).encode())
        with pytest.raises(BrokerUnavailable):
            await relay.relay_due(publisher)
        broker_link.resume()

    left = await database.fetch("SELECT request_id, state FROM undelivered_event")
    assert left == [(unconfirmed.id, "pending")] != [(confirmed.id, "pending")]


async def test_nothing_is_published_from_a_read_only_postgres(relay_once, database, tap, stored_request):
    """It could settle nothing, and every pass would publish the same events again."""
    name = await database.fetchval("SELECT quote_ident(current_database())")
    await database.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")

    with pytest.raises(PostgresUnavailable):
        await relay_once()

    assert await take_ids(tap) == []
    assert await database.fetchval("SELECT request_id FROM outbox") == stored_request.id


async def test_window_whose_commit_fails_is_published_again(relay_once, database, tap, stored_request):
    await database.execute(
        """
        CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'no commit today' USING ERRCODE = 'admin_shutdown'; END $$;
        CREATE CONSTRAINT TRIGGER fail_at_commit AFTER DELETE ON outbox
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail();
        """
    )
    with pytest.raises(PostgresUnavailable):
        await relay_once()

    await database.execute("DROP TRIGGER fail_at_commit ON outbox")
    await relay_once()

    assert await take_ids(tap) == [id_of(stored_request)] * 2
    assert await is_empty(database)


async def test_woken_relay_does_not_wait_for_its_next_poll(worker_settings, pool, database, tap):
    settings = settings_with(worker_settings, relay_poll_seconds=3600.0)
    woken = asyncio.Event()
    relay = Relay(settings, pool, woken)

    async with running(relay.run, Listener(settings, woken, relay.marks).run):
        await eventually(lambda: passes(relay.check))
        request = await store(database)
        await notify(database)
        await eventually(lambda: is_empty(database))

    assert await take_ids(tap) == [id_of(request)]
