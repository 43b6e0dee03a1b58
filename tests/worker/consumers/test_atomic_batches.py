"""Batches of what has arrived: none fails for another's fault, and each is done whole or not at all, once."""

import asyncio
from collections import Counter
from functools import partial
from types import NoneType
from typing import Any
from uuid import uuid4

import pytest

from service.calculation_requests.email_changes import FirstEmail, add_first
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from tests.harness.waiting import eventually
from tests.worker.steps import intend, store_many
from worker.batches import LARGEST_BATCH, Batches, TryAgain
from worker.consumers import calculations
from worker.consumers.calculations import CalculationAlreadyRecorded, Result
from worker.mail import ledger

LAST = ["UPDATE calculation_request", "INSERT INTO outbox", "COMMIT"]
STATEMENTS = {  # of each transaction, in order
    "results": ["BEGIN", "FOR NO KEY UPDATE", *LAST],
    "e-mails": ["BEGIN", "FOR NO KEY UPDATE", "FOR UPDATE", "UPDATE email", *LAST],
}


async def attempt(pool, batch) -> Any:
    async with connections.transaction(pool, seconds=10.0) as connection:
        return await batch(connection)


async def do(pool, batch) -> None:
    """Do a batch, again while another transaction has locked any of its rows."""

    async def is_done() -> bool:
        return not any(isinstance(each, TryAgain) for each in await attempt(pool, batch))

    await eventually(is_done)


async def batch_of(kind: str, database, requests) -> Any:
    """Return a batch that records a result, or that an e-mail was sent, for each request, the last first."""
    if kind == "results":
        delivered = [Result(request.id, "C-1") for request in requests[::-1]]
        return lambda connection: calculations.record_results(connection, delivered)
    await add_first(database, [FirstEmail(request.id) for request in requests])
    emails, _ = await ledger.claim(database, uuid4(), under_way=[], limit=1000, seconds=60)
    assert len(emails) == len(requests)
    return lambda connection: ledger.record_ends(connection, [email.ended("OK") for email in emails])


async def announced(database) -> Counter[int]:
    """Return how many requests have how many events. Checks that their sequences add up."""
    rows = await database.fetch(
        "SELECT sequence - 1, (SELECT count(*) FROM outbox WHERE request_id = request.id)"
        "  FROM calculation_request AS request"
    )
    assert all(sequence == events for sequence, events in rows)
    return Counter(events for _, events in rows)


async def test_intents_do_not_wait_for_a_session_that_is_changing_one_of_the_emails(database, pool):
    requests = await store_many(database, 2)
    intents = [FirstEmail(request.id) for request in requests]
    await add_first(database, intents[:1])

    async with database.transaction():
        await database.execute("UPDATE email SET attempts = attempts")
        async with connections.acquired(pool, seconds=5.0) as connection:
            known = await add_first(connection, intents)

    assert known == {request.id for request in requests}
    assert await database.fetchval("SELECT count(*) FROM email") == 2


@pytest.mark.parametrize("kind", STATEMENTS)
async def test_batch_that_ends_at_any_statement_leaves_nothing_and_is_done_once_when_it_is_repeated(
    database, linked_pool, link, kind
):
    batch = await batch_of(kind, database, await store_many(database, 5))
    for statement in STATEMENTS[kind]:
        link.marker_reached.clear()
        link.hold_before(statement.encode())
        doing = asyncio.create_task(do(linked_pool, batch))
        await asyncio.wait_for(link.marker_reached.wait(), 30)

        await link.cut()
        with pytest.raises(PostgresUnavailable):
            await doing

        assert await announced(database) == {0: 5}
        link.resume()

    for _ in range(2):  # a redelivery: the commit's answer was lost
        await do(linked_pool, batch)
        assert await announced(database) == {1: 5}


@pytest.mark.parametrize("kind", STATEMENTS)
async def test_batches_with_the_same_requests_do_each_once_and_do_not_deadlock(database, pool, kind):
    requests = await store_many(database, 50)
    forwards = await batch_of(kind, database, requests)
    backwards = await batch_of(kind, database, requests[::-1]) if kind == "results" else forwards

    await asyncio.gather(*(do(pool, batch) for batch in [forwards, backwards] * 3))

    assert await announced(database) == {1: 50}


LOCK_REQUEST = "SELECT FROM calculation_request WHERE id = $1 FOR SHARE"
LOCK_EMAIL = "UPDATE email SET attempts = attempts WHERE request_id = $1"


@pytest.mark.parametrize(
    ("kind", "lock"), [("results", LOCK_REQUEST), ("e-mails", LOCK_REQUEST), ("e-mails", LOCK_EMAIL)]
)
async def test_row_that_another_session_has_locked_delays_its_own_item_alone(database, pool, kind, lock):
    requests = await store_many(database, LARGEST_BATCH)
    batch = await batch_of(kind, database, requests)

    async with database.transaction():
        await database.execute(lock, requests[100].id)
        for _ in range(2):
            async with asyncio.timeout(5):  # Each attempt has 10 s.
                failures = await attempt(pool, batch)
            assert Counter(map(type, failures)) == {TryAgain: 1, NoneType: LARGEST_BATCH - 1}
            assert await announced(database) == {0: 1, 1: LARGEST_BATCH - 1}
    assert list(await attempt(pool, batch)) == [None] * LARGEST_BATCH
    assert await announced(database) == {1: LARGEST_BATCH}


async def test_first_of_several_results_in_a_batch_is_recorded_and_repeats_of_it_change_nothing(
    database, pool, stored_request
):
    first, second = (Result(stored_request.id, each) for each in ("C-1", "C-2"))

    for _ in range(2):
        failures = await attempt(pool, lambda own: calculations.record_results(own, [first, second, first]))
        assert [type(each) for each in failures] == [NoneType, CalculationAlreadyRecorded, NoneType]

    assert await database.fetchval("SELECT calculation_id FROM calculation_request") == "C-1"
    assert await database.fetchval("SELECT count(*) FROM event WHERE type = 'request.calculated'") == 1


async def test_emails_of_a_request_in_a_batch_have_sequences_of_their_own_and_are_named(
    database, pool, stored_request
):
    await intend(database, stored_request, emails=3)
    emails, _ = await ledger.claim(database, uuid4(), under_way=[], limit=10, seconds=60)

    await do(pool, lambda own: ledger.record_ends(own, [email.ended("OK") for email in emails]))

    written = await database.fetch("SELECT sequence FROM event JOIN outbox USING (request_id, sequence)")
    assert sorted(written) == [(1,), (2,), (3,), (4,)]
    assert await database.fetchval("SELECT sequence FROM calculation_request") == 4
    named = await database.fetch("SELECT data ->> 'email', data ->> 'kind' FROM event WHERE sequence > 1")
    assert sorted(named) == [(number, "invitation") for number in "123"]


@pytest.mark.parametrize(("bad", "error"), [(13, "Refused"), (0, "ZeroDivisionError"), (7, "WorkCancelled")])
async def test_batch_is_limited_and_an_item_at_fault_fails_alone(work, bad, error):
    batches, numbers = Batches(partial(work.record, None)), [*range(100, 227), bad, *range(228, 357)]
    work.going_on.clear()

    first = asyncio.create_task(batches.process(1))
    await eventually(lambda: work.batches)
    others = asyncio.gather(*(batches.process(number) for number in numbers))
    await asyncio.sleep(0)
    work.going_on.set()
    await first
    outcomes = [type(each).__name__ for each in await asyncio.wait_for(others, 30)]

    assert [len(batch) for batch in work.batches if len(batch) > 1] == [LARGEST_BATCH]
    assert dict(zip(numbers, outcomes, strict=True)) == dict.fromkeys(numbers, "NoneType") | {bad: error}


async def test_item_whose_caller_has_left_is_not_done_and_keeps_no_other_waiting(work):
    batches = Batches(partial(work.record, None))
    work.going_on.clear()
    leaving, first = [asyncio.create_task(batches.process(number)) for number in (4, 1)]
    await eventually(lambda: work.batches)
    left = asyncio.create_task(batches.process(2))
    await asyncio.sleep(0)
    leaving.cancel()
    left.cancel()
    await asyncio.sleep(0)
    work.going_on.set()
    await asyncio.wait_for(first, 30)
    await batches.process(3)

    assert work.batches == [[4, 1], [3]]
