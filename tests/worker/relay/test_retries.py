"""Refused events are held, and retried until they are delivered, without delaying the others."""

import pytest

from tests.worker.conftest import TRACEPARENT, announce_next, hold_events, store, store_as, take_ids
from tests.worker.relay.conftest import bind_full_queue, id_of, into_one_lane
from worker.relay import loop, outbox_tables


@pytest.fixture
async def refusing(channel):
    """A queue of another team that refuses request.created, while notifications and the tap take it."""
    return await bind_full_queue(channel, "request.created")


async def make_due(database) -> None:
    await database.execute("UPDATE outbox_held SET next_attempt_at = now() WHERE attempts > 0")


@pytest.mark.parametrize(("attempts", "pause"), [(0, 100), (1, 200), (2, 300), (5000, 300)])
async def test_wait_of_a_refused_event_doubles_up_to_the_longest(database, attempts, pause):
    [held] = await hold_events(database, (await store(database)).id)
    await database.execute("UPDATE outbox_held SET attempts = $1", attempts)  # 2 ^ 5000 is no double.

    await outbox_tables.postpone(database, [held], {held.id: "why"}, base_seconds=100)

    row = await database.fetchrow("SELECT attempts, next_attempt_at - now() AS pause FROM outbox_held")
    assert (row["attempts"], round(row["pause"].total_seconds())) == (attempts + 1, pause)


async def test_waiting_event_that_is_deleted_by_hand_leaves_the_refused_one_its_pause(database):
    request = await store(database)
    await announce_next(database, request.id)
    refused, waiting = await hold_events(database, request.id)
    await outbox_tables.postpone(database, [refused], {refused.id: "why"}, base_seconds=100)

    await database.execute("DELETE FROM outbox_held WHERE id = $1", waiting.id)

    assert await database.fetchval("SELECT next_attempt_at > now() FROM outbox_held")


async def test_refused_event_is_logged_with_the_uuid_and_trace_of_its_request(
    relay_once, database, refusing, logs, monkeypatch
):
    monkeypatch.setattr(loop, "_RETRY_SECONDS", 0.0001)
    request = await store(database, traceparent=TRACEPARENT)

    await relay_once()
    await refusing.delete(if_empty=False)
    await relay_once()

    story = [line for line in logs if "event_id" in line]
    assert [(line["event"], line["event_id"]) for line in story] == [
        ("event_not_published", id_of(request)),
        ("held_event_published", id_of(request)),
    ]
    assert {line["uuid"] for line in story} == {request.uuid}
    assert {line["trace_id"] for line in story} == {TRACEPARENT.split("-")[1]}


@pytest.mark.usefixtures("refusing")
async def test_few_refused_events_are_retried_in_a_pass_and_new_ones_sent_at_once(
    relay_once, database, tap, monkeypatch
):
    """Each attempt puts one more copy into every queue that takes the event."""
    monkeypatch.setattr(loop, "_RETRY_SECONDS", 3600.0)
    monkeypatch.setattr(loop, "_HELD_BATCH_SIZE", 2)
    requests = [await store(database) for _ in range(5)]
    await into_one_lane(database)
    while await relay_once():
        pass
    copies_at_first = await take_ids(tap)

    await make_due(database)
    new = await store(database)
    await relay_once()
    copies = await take_ids(tap)

    assert copies_at_first == [id_of(request) for request in requests]
    assert copies.count(id_of(new)) == 1
    assert len(copies) == 1 + 2


@pytest.mark.usefixtures("refusing")
async def test_refused_events_are_retried_in_turn(relay_once, database, tap, monkeypatch):
    monkeypatch.setattr(loop, "_RETRY_SECONDS", 0.0001)
    monkeypatch.setattr(loop, "_HELD_BATCH_SIZE", 1)
    requests = [await store(database) for _ in range(3)]
    await into_one_lane(database)

    for _ in range(1 + 3 * 2):
        await relay_once()

    copies = await take_ids(tap)
    assert copies[:3] == [id_of(request) for request in requests]
    assert copies[3:] == [id_of(request) for request in requests] * 2


async def test_event_that_waited_behind_a_refused_one_is_published_at_once_while_others_are_refused(
    relay_once, database, channel, refusing, monkeypatch
):
    """It was not refused itself. In one lane, the refused events would otherwise fill every batch."""
    monkeypatch.setattr(loop, "_RETRY_SECONDS", 3600.0)
    await bind_full_queue(channel, "request.email_sent")
    for request in [await store(database) for _ in range(10)]:
        await announce_next(database, request.id)
    await database.execute("UPDATE outbox SET type = 'request.calculated' WHERE sequence = 2")
    for _ in range(25):
        await store_as(database, "request.email_sent")
    await into_one_lane(database)
    await relay_once()
    await refusing.delete(if_empty=False)
    await make_due(database)

    for _ in range(4):
        await relay_once()

    held = await database.fetch("SELECT DISTINCT type FROM outbox_held")
    assert [row["type"] for row in held] == ["request.email_sent"]
