"""`outbox list|replay`: unpublished events, and the same events again, in order and slowly."""

import asyncio
import os
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from service.postgres.pool import Connection
from tests.harness.databases import has_waiting_statement
from tests.harness.stored import QUEUED
from tests.harness.waiting import eventually
from tests.worker.commands.conftest import command
from tests.worker.conftest import TRACEPARENT, announce_next, hold_events, store, store_old
from tests.worker.steps import calculate, finish, store_many
from worker.commands import outbox

pytestmark = pytest.mark.usefixtures("on_servers")


async def replayed(*words: str, since: str = "2020-01-01T00:00:00Z") -> Counter[str]:
    tally: Counter[str] = (await command("outbox", "replay", "--from", since, *words)).data
    return tally


async def take(database: Connection) -> Any:
    """Take all events out of the outbox, in order."""
    rows = await database.fetch(QUEUED)
    await database.execute("DELETE FROM outbox")
    return rows


async def test_events_are_counted_and_held_ones_listed_first_with_their_errors(database, retrying):
    requests = [await store(database) for _ in range(3)]
    await database.execute("UPDATE outbox SET created_at = now() - interval '90 s'")
    os.environ["AMQP_URL"] = ""  # It needs no broker.

    found = (await command("outbox", "list", "--limit", "4")).data

    assert all(90 <= part["oldest_seconds"] < 120 for part in found["counts"])
    assert {(part["state"], part["type"], part["events"]) for part in found["counts"]} == {
        ("pending", "request.created", 3),
        ("retrying", "request.created", 1),
        ("waiting", "request.email_sent", 1),
    }
    columns = ("uuid", "type", "state", "attempts", "last_error")
    first, second, *others = found["events"]
    error = "returned: no queue is bound for it"
    assert [first[each] for each in columns] == [retrying.id, "request.created", "retrying", 3, error]
    assert [second[each] for each in columns[:3]] == [retrying.id, "request.email_sent", "waiting"]
    assert (first["next_attempt_at"] is None, second["next_attempt_at"]) == (False, None)
    assert [event["uuid"] for event in others] == [request.id for request in requests[:2]]


async def test_replayed_events_are_the_same_but_for_the_trace(database, postman):
    request = await store(database, external_id="case-7", traceparent=TRACEPARENT)
    await finish(database, postman, request)
    before = await take(database)

    tally = await replayed()

    assert [row["type"] for row in before] == ["request.created", "request.email_sent", "request.calculated"]
    assert before[0]["traceparent"] == TRACEPARENT
    assert await take(database) == [(*row[:-1], None) for row in before]
    assert (tally["requests"], tally["events"]) == (1, 3)


async def test_only_events_since_the_given_time_are_replayed_however_old_their_request_is(database):
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
    times = [noon - timedelta(days=1), noon, noon + timedelta(hours=1)]
    requests = [await store_old(database, at) for at in times]
    await calculate(database, requests[0].uuid)
    await database.execute("UPDATE event SET time = $1 WHERE sequence = 2", noon)
    await take(database)

    await replayed(since="2026-03-01T13:00:00+01:00")

    assert [tuple(row)[:3] for row in await take(database)] == [
        (requests[0].id, 2, "request.calculated"),
        *((request.id, 1, "request.created") for request in requests[1:]),
    ]


async def test_requests_with_an_unpublished_event_are_left_out(database):
    requests = await store_many(database, 2)
    for request in requests:
        await calculate(database, request.uuid)
    await hold_events(database, requests[0].id)

    tally = await replayed()

    assert (tally["events"], tally["requests_undelivered"]) == (0, 2)


async def test_new_event_waits_for_the_replay_of_its_request_and_comes_after_it(database, other_connection):
    [request] = await store_many(database, 1)

    async with database.transaction():
        await outbox.replay(database, [request.id], None)
        announcing = asyncio.create_task(announce_next(other_connection, request.id))
        await eventually(lambda: has_waiting_statement(database))
    await announcing

    assert [row["sequence"] for row in await take(database)] == [1, 2]


async def test_only_the_last_event_of_an_erased_request_is_replayed(database, stored_request):
    """Its others have changed since they were published."""
    await command("request", "erase", stored_request.uuid)
    pending = await replayed()
    *_, erased = await take(database)

    tallies = [await replayed(*words) for words in ((), (), ("--uuid", stored_request.uuid))]

    assert [each["events"] for each in (pending, *tallies)] == [0, 1, 0, 0]
    assert await take(database) == [erased]
    assert (await replayed("--uuid", stored_request.uuid))["events"] == 1
    assert erased["type"] == "request.erased"


async def test_many_requests_are_replayed_in_batches_at_a_fixed_rate(database):
    await store_many(database, 300)
    clock = asyncio.get_running_loop()
    begin = clock.time()

    tally = await replayed()

    assert clock.time() - begin >= 300 / outbox.EVENTS_PER_SECOND
    assert (tally["requests"], tally["events"]) == (300, 300)
    assert len({row["request_id"] for row in await take(database)}) == 300
    [record] = await database.fetch("SELECT request_id, conveyancer_id, subject FROM operator_action")
    assert record == (None, None, "300 events from 2020-01-01T00:00:00Z on")
