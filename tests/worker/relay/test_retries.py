"""Refused events are held, and retried until they are delivered, without delaying the others."""

import asyncio
import time

import pytest

from service.calculation_requests.changing import change
from service.outbox.events import RequestEmailSent
from tests.worker.conftest import announce_next, hold_events, store, store_as, take_ids
from tests.worker.relay.conftest import bind_full_queue, id_of
from worker.relay import loop


@pytest.fixture
async def refusing(channel):
    """A queue of another team that refuses request.created, while notifications and the tap take it."""
    return await bind_full_queue(channel, "request.created")


async def make_due(database) -> None:
    await database.execute("UPDATE outbox SET next_attempt_at = now() WHERE next_attempt_at IS NOT NULL")


@pytest.mark.parametrize(("attempts", "pause"), [(0, 100), (1, 200), (2, 300), (5000, 300)])
async def test_wait_of_a_refused_event_doubles_up_to_the_longest(database, attempts, pause):
    request = await store(database)
    await announce_next(database, request.id)
    had = "UPDATE outbox SET attempts = $1 WHERE sequence = 1"  # 2 ^ 5000 is no double.
    await database.execute(had, attempts)

    await hold_events(database, request.id)
    await announce_next(database, request.id)

    rows = await database.fetch("SELECT attempts, next_attempt_at - now() FROM outbox ORDER BY sequence")
    held = [(row[0], round(row[1].total_seconds())) for row in rows]
    assert held == [(attempts + 1, pause), (0, pause), (0, pause)]


@pytest.mark.parametrize("is_confirmed", [True, False])
async def test_later_event_that_a_person_has_locked_delays_no_pass(
    relay_once, database, other_connection, stored_request, tap, channel, is_confirmed
):
    await announce_next(database, stored_request.id)
    if is_confirmed:
        await hold_events(database, stored_request.id)
        await make_due(database)
    else:
        await bind_full_queue(channel, "request.created")

    async with other_connection.transaction(), asyncio.timeout(2.0):
        await other_connection.execute("SELECT FROM outbox WHERE sequence = 2 FOR UPDATE")
        await relay_once()
        assert await take_ids(tap) == [id_of(stored_request)]


async def test_held_events_of_a_request_are_published_one_after_another(
    relay_once, database, stored_request, tap
):
    await announce_next(database, stored_request.id)
    await hold_events(database, stored_request.id)
    await make_due(database)

    assert [await relay_once() for _ in range(3)] == [1, 1, 0]
    ids = await take_ids(tap)
    assert [str(each).rpartition(".")[2] for each in ids] == ["1", "2"]


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("is_confirmed", [True, False])
async def test_event_that_is_written_while_the_one_before_it_is_settled_follows_it(
    relay_once, database, other_connection, stored_request, tap, channel, is_confirmed, is_held, monkeypatch
):
    """Neither transaction sees what the other has written."""
    monkeypatch.setattr(loop, "_RETRY_SECONDS", 0.0001)
    monkeypatch.setattr(loop, "_FAILED_RETRY_SECONDS", 0.0)
    if is_held:
        await hold_events(database, stored_request.id)
        await make_due(database)
    refusing = None if is_confirmed else await bind_full_queue(channel, "request.created")

    async with other_connection.transaction():
        async with change(other_connection, stored_request.id) as request:
            request.announce(RequestEmailSent, email=1, kind="invitation")
        await relay_once()
    if refusing:
        await refusing.delete(if_empty=False)
    for _ in range(2):
        await relay_once()

    first = dict.fromkeys(await take_ids(tap))
    assert list(first) == [id_of(stored_request), f"{stored_request.uuid}.request.email_sent.2"]


@pytest.mark.usefixtures("refusing")
async def test_few_refused_events_are_retried_in_a_pass_and_new_ones_sent_at_once(
    relay_once, database, tap, monkeypatch
):
    """Each attempt puts one more copy into every queue that takes the event."""
    monkeypatch.setattr(loop, "_RETRY_SECONDS", 3600.0)
    monkeypatch.setattr(loop, "_HELD_BATCH_SIZE", 2)
    requests = [await store(database) for _ in range(5)]
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
    monkeypatch.setattr(loop, "_FAILED_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(loop, "_HELD_BATCH_SIZE", 1)
    requests = [await store(database) for _ in range(3)]

    for _ in range(1 + 3 * 2):
        await relay_once()

    copies = await take_ids(tap)
    assert copies[:3] == [id_of(request) for request in requests]
    assert copies[3:] == [id_of(request) for request in requests] * 2


@pytest.mark.usefixtures("refusing")
async def test_failed_retries_are_at_most_a_hundred_a_second(relay_once, database, tap, monkeypatch):
    monkeypatch.setattr(loop, "_RETRY_SECONDS", 0.0001)
    for _ in range(20):
        await store(database)
    await relay_once()
    await take_ids(tap)
    began = time.monotonic()

    for _ in range(6):
        await store(database)
        await relay_once()

    retried = len(await take_ids(tap)) - 6
    assert 20 <= retried <= 20 + 100 * (time.monotonic() - began)


async def test_event_behind_a_refused_one_is_published_at_once_after_it_while_others_are_refused(
    relay_once, database, channel, refusing, monkeypatch
):
    monkeypatch.setattr(loop, "_RETRY_SECONDS", 3600.0)
    await bind_full_queue(channel, "request.email_sent")
    for request in [await store(database) for _ in range(10)]:
        await announce_next(database, request.id)
    await database.execute("UPDATE event SET type = 'request.calculated' WHERE sequence = 2")
    for _ in range(25):
        await store_as(database, "request.email_sent")
    await relay_once()
    await refusing.delete(if_empty=False)
    await make_due(database)

    for _ in range(4):
        await relay_once()

    held = await database.fetch("SELECT DISTINCT type FROM outbox JOIN event USING (request_id, sequence)")
    assert [row["type"] for row in held] == ["request.email_sent"]
