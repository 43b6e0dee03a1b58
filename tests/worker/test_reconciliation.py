"""What reconciliation finds is exported every few minutes."""

import asyncio
import math
from functools import partial

import pytest

from tests.harness.databases import has_waiting_statement
from tests.harness.in_process import running
from tests.harness.metrics import value
from tests.harness.waiting import eventually
from worker import reconciliation


@pytest.mark.usefixtures("stored_request")
async def test_discrepancies_of_the_last_day_are_exported(database, pool):
    await database.execute("DELETE FROM outbox")
    await database.execute("UPDATE calculation_request SET created_at = now() - interval '1 hour'")

    await reconciliation.look(pool)

    assert value("reconciliation_discrepancies", kind="request_without_email") == 1
    assert value("reconciliation_discrepancies", kind="event_overdue") == 0
    assert 0 <= value("reconciliation_age_seconds") < 60

    await database.execute("UPDATE calculation_request SET created_at = now() - interval '25 hours'")
    await reconciliation.look(pool)

    assert value("reconciliation_discrepancies", kind="request_without_email") == 0


async def test_reconciliation_repeats_until_it_is_stopped_even_during_a_look(pool, database, monkeypatch):
    monkeypatch.setattr(reconciliation, "INTERVAL_SECONDS", 0.01)
    ages = [math.inf]
    successes = 0

    def has_succeeded_three_times() -> bool:
        nonlocal successes
        ages.append(value("reconciliation_age_seconds"))
        successes += ages[-1] < ages[-2]
        return successes == 4

    async with asyncio.timeout(30), database.transaction(), running(partial(reconciliation.run, pool)):
        await eventually(has_succeeded_three_times)
        await database.execute("LOCK TABLE calculation_request")
        await eventually(lambda: has_waiting_statement(database))
