"""What reconciliation finds is exported every few minutes."""

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial

from service.identifiers import first_id_at
from tests.harness.databases import has_waiting_statement
from tests.harness.in_process import running
from tests.harness.metrics import value
from tests.harness.waiting import eventually
from worker import reconciliation


async def test_discrepancies_of_the_last_day_are_exported(database, pool, stored_request):
    await database.execute("DELETE FROM outbox")
    await database.execute("UPDATE calculation_request SET created_at = now() - interval '1 hour'")

    await reconciliation.look(pool)

    assert value("reconciliation_discrepancies", kind="request_without_email") == 1
    assert value("reconciliation_discrepancies", kind="event_overdue") == 0
    assert value("reconciliation_last_success_timestamp_seconds") > stored_request.created_at.timestamp()

    older = first_id_at(datetime.now(UTC) - timedelta(hours=25))
    await database.execute("UPDATE calculation_request SET id = $1", older)
    await reconciliation.look(pool)

    assert value("reconciliation_discrepancies", kind="request_without_email") == 0


async def test_reconciliation_repeats_until_it_is_stopped_even_during_a_look(pool, database, monkeypatch):
    monkeypatch.setattr(reconciliation, "INTERVAL_SECONDS", 0.01)
    succeeded_at = {value("reconciliation_last_success_timestamp_seconds")}

    def has_succeeded_three_times() -> bool:
        succeeded_at.add(value("reconciliation_last_success_timestamp_seconds"))
        return len(succeeded_at) == 4

    async with asyncio.timeout(30), database.transaction(), running(partial(reconciliation.run, pool)):
        await eventually(has_succeeded_three_times)
        await database.execute("LOCK TABLE calculation_request")
        await eventually(lambda: has_waiting_statement(database))
