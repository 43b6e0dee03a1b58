"""`reconcile`: whether requests, events, e-mails and calculations add up, and the repair."""

from datetime import timedelta
from uuid import UUID

import pytest

from service.postgres.pool import Connection
from tests.worker.commands.conftest import command
from tests.worker.commands.steps import attempt_emails, calculate, intend, intend_another
from tests.worker.conftest import announce_next, hold_events, store
from worker import reconciliation
from worker.reconciliation import Discrepancy


@pytest.fixture
async def settled(database, postman):
    """A request whose e-mail is sent, whose calculation is recorded and whose events are published."""
    request = await store(database)
    await intend(database, request)
    await attempt_emails(database, postman)
    await calculate(database, request)
    await database.execute("DELETE FROM outbox")
    return request


async def found(database: Connection) -> list[Discrepancy]:
    """Return the discrepancies of all requests, without those that did not occur."""
    discrepancies = await reconciliation.find_discrepancies(database, UUID(int=0))
    return [discrepancy for discrepancy in discrepancies if discrepancy.count]


def counts(discrepancies: list[Discrepancy]) -> dict[str, int]:
    """Return how often each discrepancy occurred."""
    return {discrepancy.name: discrepancy.count for discrepancy in discrepancies if discrepancy.count}


async def make_old(database: Connection) -> None:
    """Make everything an hour and a minute older."""
    for statement in (
        "UPDATE calculation_request SET created_at = created_at - interval '61 min'",
        "UPDATE outbox SET created_at = created_at - interval '61 min'",
        "UPDATE outbox_held SET created_at = created_at - interval '61 min'",
        "UPDATE email SET created_at = created_at - interval '61 min'",
    ):
        await database.execute(statement)


async def test_finished_request_with_two_emails_adds_up(worker_settings, database, postman, settled):
    await intend_another(database, settled)
    unsent = await found(database)
    await attempt_emails(database, postman)
    await database.execute("DELETE FROM outbox")
    await make_old(database)

    answer = await command(worker_settings, "reconcile")

    assert (unsent, counts(answer.data.discrepancies), answer.status) == ([], {}, 0)
    assert settled.uuid not in answer.text


async def test_recent_request_is_no_discrepancy(database, stored_request):
    with_event = await found(database)
    await intend(database, stored_request)
    await database.execute("DELETE FROM outbox")
    with_email = await found(database)

    assert with_event == with_email == []


async def test_request_without_an_email_is_found_once_its_event_is_published(
    worker_settings, database, stored_request
):
    await make_old(database)
    while_pending = counts(await found(database))
    await database.execute("DELETE FROM outbox")

    answer = await command(worker_settings, "reconcile")

    assert while_pending == {"event_overdue": 1}
    assert counts(answer.data.discrepancies) == {"request_without_email": 1}
    assert answer.status == 1
    assert stored_request.uuid in answer.text
    assert answer.data.discrepancies[0].uuids == [stored_request.uuid]


async def test_repair_announces_again_every_old_request_without_an_email_and_no_other(
    worker_settings, database, settled
):
    vanished = [await store(database) for _ in range(15)]
    await database.execute("DELETE FROM outbox")
    await make_old(database)
    await store(database)  # young
    await database.execute("DELETE FROM outbox")

    words = ("reconcile", "--repair", "--by", "Ada", "--note", "the queue was lost")
    answer = await command(worker_settings, *words)

    assert counts(answer.data.discrepancies) == {"request_without_email": 15}
    assert (answer.status, answer.data.announced_again) == (1, 15)
    rows = await database.fetch("SELECT request_id, type, sequence FROM outbox ORDER BY request_id")
    announced = [(row["request_id"], row["type"], row["sequence"]) for row in rows]
    assert announced == [(request.id, "request.created", 1) for request in vanished]
    assert settled.id not in [request_id for request_id, *_ in announced]
    [record] = await database.fetch("SELECT request_id, action, subject, operator, note FROM operator_action")
    assert record == (
        *(None, "reconcile --repair", "request.created of 15 requests"),
        *("Ada", "the queue was lost"),
    )


async def test_email_pending_for_too_long_is_found(database, stored_request):
    await intend(database, stored_request)
    await intend_another(database, stored_request)
    await database.execute("DELETE FROM outbox")
    await make_old(database)

    assert counts(await found(database)) == {"email_overdue": 1}


async def test_held_events_are_found_when_they_are_old(database, stored_request):
    await announce_next(database, stored_request.id)
    await hold_events(database, stored_request.id)
    await database.execute("UPDATE calculation_request SET sequence = 1")
    young = counts(await found(database))
    await make_old(database)

    assert young == {}
    assert counts(await found(database)) == {"event_overdue": 2}


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE calculation_request SET sequence = 1",
        "UPDATE calculation_request SET sequence = 4",
        "UPDATE calculation_request SET calculation_sequence = NULL",
        "UPDATE calculation_request SET calculation_sequence = 2",
        "UPDATE calculation_request SET calculation_sequence = 4",
        "UPDATE calculation_request SET calculation_id = NULL",
        "UPDATE email SET event_sequence = NULL",
        "UPDATE email SET event_sequence = 1",
        "UPDATE email SET settled_at = NULL",
    ],
)
async def test_sequence_that_does_not_add_up_is_found(database, settled, damage):
    await database.execute(damage)

    [wrong] = await found(database)

    assert (wrong.name, wrong.count, wrong.uuids) == ("sequence_wrong", 1, [settled.uuid])


async def test_examples_are_bounded_and_the_count_is_not(database):
    requests = [await store(database) for _ in range(15)]
    await make_old(database)

    [overdue] = await found(database)

    assert overdue.count == 15
    assert overdue.uuids == [request.uuid for request in requests[:10]]


async def test_only_requests_since_a_time_are_checked(worker_settings, database, stored_request):
    await make_old(database)
    later = stored_request.created_at + timedelta(hours=1)

    answer = await command(worker_settings, "reconcile", "--since", later.isoformat())

    assert counts(answer.data.discrepancies) == {}
    assert answer.status == 0
