"""`outbox replay`: the same events again, in order, slowly, and never twice at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec
import pytest
from aio_pika.abc import AbstractIncomingMessage

from service.calculation_requests.model import CalculationRequest
from service.identifiers import new_request_id, uuid_of
from service.outbox.events import EVENT_TYPES
from service.postgres.pool import Connection
from tests.harness.databases import has_waiting_statement
from tests.harness.waiting import eventually
from tests.worker import deliveries
from tests.worker.commands.conftest import command
from tests.worker.commands.steps import attempt_emails, calculate, intend, store_many
from tests.worker.conftest import TRACEPARENT, announce_next, hold_events, store, take_all
from tests.worker.reference_consumer import ReferenceConsumer
from worker.commands import replay
from worker.commands.replay import Selection, Tally

ALWAYS = ("--from", "2020-01-01T00:00:00Z")
Deliver = Callable[[], Awaitable[list[AbstractIncomingMessage]]]


@pytest.fixture
def deliver(relay, publisher, tap):
    """Relay until nothing is due, and return the messages that arrived."""

    async def relay_all() -> list[AbstractIncomingMessage]:
        while await relay.relay_due(publisher):
            pass
        return await take_all(tap)

    return relay_all


async def move(database: Connection, request: CalculationRequest, to: datetime) -> UUID:
    """Change the time of a stored request. Returns its new id."""
    moved = UUID(int=(int(to.timestamp() * 1000) << 80) | request.id.int & (1 << 80) - 1)
    await database.execute(
        "UPDATE calculation_request SET id = $2, created_at = $3 WHERE id = $1", request.id, moved, to
    )
    return moved


def ids(messages: list[AbstractIncomingMessage]) -> list[str | None]:
    """Return the ids of messages."""
    return [message.message_id for message in messages]


async def test_replayed_events_are_the_same_to_the_byte(worker_settings, database, postman, deliver):
    request = await store(database, external_id="case-7")
    await intend(database, request)
    await attempt_emails(database, postman)
    await calculate(database, request)
    before = await deliver()

    answer = await command(worker_settings, "outbox", "replay", *ALWAYS)

    after = await deliver()
    assert [message.routing_key for message in before] == [
        "request.created",
        "request.email_sent",
        "request.calculated",
    ]
    assert [message.body for message in after] == [message.body for message in before]
    assert [message.headers for message in after] == [message.headers for message in before]
    assert ids(after) == ids(before)
    assert (answer.data.requests, answer.data.events) == (1, 3)


async def test_replay_leaves_out_nothing_but_the_trace(worker_settings, database, deliver):
    await store(database, traceparent=TRACEPARENT)
    [before] = await deliver()

    await command(worker_settings, "outbox", "replay", *ALWAYS)

    [after] = await deliver()
    original, replayed = msgspec.json.decode(before.body), msgspec.json.decode(after.body)
    assert original.pop("traceparent") == TRACEPARENT
    assert replayed == original
    assert "traceparent" not in after.headers


async def test_only_events_of_the_given_time_are_replayed(worker_settings, database, deliver):
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
    times = [noon - timedelta(seconds=1), noon, noon + timedelta(hours=1), noon + timedelta(hours=2)]
    requests = [await store(database) for _ in times]
    await database.execute("DELETE FROM outbox")
    moved = [await move(database, *pair) for pair in zip(requests, times, strict=True)]
    asked = ("--from", "2026-03-01T12:00:00Z", "--to", "2026-03-01T15:00:00+01:00")

    await command(worker_settings, "outbox", "replay", *asked, "--type", "request.created")

    assert sorted(map(str, ids(await deliver()))) == [
        f"{uuid_of(one)}.request.created.1" for one in moved[1:3]
    ]


async def test_event_of_an_older_request_is_found_by_its_own_time(
    worker_settings, database, deliver, stored_request
):
    await database.execute("DELETE FROM outbox")
    moved = await move(database, stored_request, datetime(2025, 1, 1, tzinfo=UTC))
    await deliveries.calculate(database, uuid_of(moved), "C-1")
    await deliver()

    await command(worker_settings, "outbox", "replay", "--from", "2026-01-01")

    assert ids(await deliver()) == [f"{uuid_of(moved)}.request.calculated.2"]


async def test_order_within_each_request_is_kept_even_if_clocks_differed(worker_settings, database, deliver):
    requests = [await store(database) for _ in range(10)]
    for request in requests:
        await calculate(database, request)
    await database.execute("UPDATE calculation_request SET calculated_at = created_at - interval '1 s'")
    await deliver()

    await command(worker_settings, "outbox", "replay", *ALWAYS)

    consumer = ReferenceConsumer()
    for message in await deliver():
        consumer.take(message.body)
    assert consumer.counts == {"new": 20, "repeat": 0, "gap": 0, "inversion": 0, "conflict": 0}


@pytest.mark.parametrize("where", ["outbox", "outbox_held"])
async def test_request_with_an_unpublished_event_is_left_out(
    worker_settings, database, where, stored_request
):
    await database.execute("DELETE FROM outbox")
    await calculate(database, stored_request)
    if where == "outbox_held":
        await hold_events(database, stored_request.id)

    answer = await command(worker_settings, "outbox", "replay", *ALWAYS, "--type", "request.created")

    assert (answer.data.events, answer.data.requests_undelivered) == (0, 1)


async def test_new_event_waits_for_the_replay_of_its_request_and_comes_after_it(
    database, other_connection, stored_request
):
    await database.execute("DELETE FROM outbox")
    selection = Selection(since=None, until=datetime.now(UTC), types=frozenset(EVENT_TYPES))

    async with database.transaction():
        await replay.replay_batch(database, [stored_request.id], selection, Tally())
        announcing = asyncio.create_task(announce_next(other_connection, stored_request.id))
        await eventually(lambda: has_waiting_statement(database))
    await announcing

    assert await database.fetch("SELECT sequence FROM outbox ORDER BY id") == [(1,), (2,)]


async def test_rate_is_kept(worker_settings, database):
    for _ in range(11):
        await store(database)
    await database.execute("DELETE FROM outbox")
    clock = asyncio.get_running_loop()
    begin = clock.time()

    await command(worker_settings, "outbox", "replay", *ALWAYS, "--rate", "10")

    assert clock.time() - begin >= 1.0


async def test_request_erased_during_a_replay_is_left_out(database, stored_request):
    await database.execute("DELETE FROM outbox")
    selection = Selection(since=None, until=datetime.now(UTC), types=frozenset(EVENT_TYPES))
    erased = new_request_id()

    written = await replay.replay_batch(database, [stored_request.id, erased], selection, Tally())

    assert written == await database.fetchval("SELECT count(*) FROM outbox") == 1


async def test_many_requests_are_replayed_in_pages(worker_settings, database):
    await store_many(database, 1500)

    answer = await command(worker_settings, "outbox", "replay", *ALWAYS, "--rate", "100000")

    assert (answer.data.requests, answer.data.events) == (1500, 1500)
    assert await database.fetchval("SELECT count(DISTINCT request_id) FROM outbox") == 1500
    [record] = await database.fetch("SELECT request_id, conveyancer_id, subject FROM operator_action")
    assert (record["request_id"], record["conveyancer_id"]) == (None, None)
    assert record["subject"].startswith("1500 events from 2020-01-01T00:00:00Z to 20")
