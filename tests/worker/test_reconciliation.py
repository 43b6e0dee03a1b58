"""What reconciliation finds is exported every few minutes, by one replica at a time."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from service.calculation_requests.model import CalculationRequest
from service.identifiers import first_id_at
from service.postgres import pool as postgres
from service.postgres.pool import Connection, Pool
from tests.harness.in_process import running
from tests.harness.metrics import value
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.worker.conftest import settings_with
from worker import metrics
from worker.reconciliation import Discrepancies
from worker.settings import WorkerSettings


@pytest.fixture
async def looking_elsewhere(
    worker_settings: WorkerSettings, postgres_link: TcpProxy
) -> AsyncIterator[asyncio.Task[None]]:
    """A look of another replica, in progress: it has the lock, and its first check is held back."""
    postgres_link.hold_before(b"count(*) OVER ()")
    settings = settings_with(worker_settings, database_url=postgres_link.url)
    async with postgres.open_pool(settings) as pool:
        looking = asyncio.create_task(Discrepancies(pool).look())
        await postgres_link.marker_reached.wait()
        yield looking
        await postgres_link.cut()
        await looking


async def has_looked(discrepancies: Discrepancies) -> bool:
    """Look, and return False if the look was left to another replica."""
    metrics.reconciled_at.set(0)
    await discrepancies.look()
    return value("reconciliation_last_success_timestamp_seconds") > 0


async def test_replica_leaves_the_look_to_the_one_that_is_looking(
    pool: Pool, postgres_link: TcpProxy, looking_elsewhere: asyncio.Task[None]
) -> None:
    discrepancies = Discrepancies(pool)
    while_other_looks = await has_looked(discrepancies)
    postgres_link.resume()
    await looking_elsewhere

    assert not while_other_looks
    assert await has_looked(discrepancies)


@pytest.mark.parametrize("way", ["dies", "vanishes"])
@pytest.mark.usefixtures("looking_elsewhere")
async def test_replica_looks_once_the_one_that_was_looking_is_gone(
    pool: Pool, postgres_link: TcpProxy, way: str
) -> None:
    """With its machine, it vanishes without closing the connection: Postgres gives up after some seconds."""
    discrepancies = Discrepancies(pool)
    before = await has_looked(discrepancies)
    if way == "dies":
        await postgres_link.cut()

    await eventually(lambda: has_looked(discrepancies))

    assert not before


async def test_discrepancies_of_the_last_day_are_exported(
    database: Connection, pool: Pool, stored_request: CalculationRequest
) -> None:
    await database.execute("DELETE FROM outbox")
    await database.execute("UPDATE calculation_request SET created_at = now() - interval '1 hour'")

    await Discrepancies(pool).look()

    assert value("reconciliation_discrepancies", kind="request_without_email") == 1
    assert value("reconciliation_discrepancies", kind="sequence_wrong") == 0
    assert value("reconciliation_last_success_timestamp_seconds") > stored_request.created_at.timestamp()

    older = first_id_at(datetime.now(UTC) - timedelta(hours=25))
    await database.execute("UPDATE calculation_request SET id = $1", older)
    await Discrepancies(pool).look()

    assert value("reconciliation_discrepancies", kind="request_without_email") == 0


async def test_reconciliation_repeats_until_it_is_stopped(pool: Pool) -> None:
    succeeded_at = {value("reconciliation_last_success_timestamp_seconds")}

    def has_succeeded_three_times() -> bool:
        succeeded_at.add(value("reconciliation_last_success_timestamp_seconds"))
        return len(succeeded_at) == 4

    async with running(Discrepancies(pool, interval_seconds=0.01).run):
        await eventually(has_succeeded_three_times)
