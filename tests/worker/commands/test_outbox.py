"""`outbox list`: how many events are unpublished, and why."""

import pytest

from tests.worker.commands.conftest import command
from tests.worker.conftest import announce_next, hold_events, settings_with, store
from worker.commands.outbox import Backlog, Undelivered
from worker.settings import WorkerSettings


@pytest.fixture
async def retrying(database):
    """A request whose request.created was refused, and whose next event waits behind it."""
    request = await store(database)
    await announce_next(database, request.id)
    await hold_events(database, request.id)
    await database.execute(
        """
        UPDATE outbox_held
           SET attempts = 3, last_error = 'returned: no queue is bound for it',
               next_attempt_at = now() + interval '1 h'
         WHERE sequence = 1
        """
    )
    return request


async def listed(settings: WorkerSettings, *words: str) -> Undelivered:
    """Return the answer of `outbox list`, which needs no broker."""
    undelivered: Undelivered = (
        await command(settings_with(settings, amqp_url=""), "outbox", "list", *words)
    ).data
    return undelivered


async def test_empty_outbox_has_nothing_to_list(worker_settings):
    answer = await command(worker_settings, "outbox", "list")

    assert (answer.data, answer.text) == (Undelivered([], []), "none\n\nnone")


@pytest.mark.usefixtures("retrying")
async def test_events_are_counted_by_state_and_type(worker_settings, database):
    for _ in range(3):
        await store(database)
    await database.execute("UPDATE outbox SET created_at = now() - interval '90 s'")
    lanes = await database.fetchval("SELECT count(DISTINCT lane) FROM outbox")

    pending, *held = sorted((await listed(worker_settings)).counts, key=lambda part: -part.oldest_seconds)

    assert pending == Backlog("pending", "request.created", 3, lanes, pending.oldest_seconds)
    assert 90 <= pending.oldest_seconds < 120
    assert {(part.state, part.type, part.events, part.lanes) for part in held} == {
        ("retrying", "request.created", 1, 1),
        ("waiting", "request.email_sent", 1, 1),
    }


async def test_held_events_come_first_with_their_errors_and_then_the_oldest_pending_ones(
    worker_settings, database, retrying
):
    requests = [await store(database) for _ in range(5)]

    found = (await listed(worker_settings, "--limit", "4")).events

    first, second, *pending = found
    assert (first.event_id, first.state, first.attempts) == (
        f"{retrying.uuid}.request.created.1",
        "retrying",
        3,
    )
    assert first.last_error == "returned: no queue is bound for it"
    assert first.next_attempt_at is not None
    assert (second.event_id, second.state) == (f"{retrying.uuid}.request.email_sent.2", "waiting")
    assert second.next_attempt_at is None
    assert [event.event_id for event in pending] == [
        f"{request.uuid}.request.created.1" for request in requests[:2]
    ]
