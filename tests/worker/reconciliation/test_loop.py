"""The reconciliation of several replicas: one looks at a time."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from service.postgres import pool as postgres
from service.postgres.pool import Pool
from tests.harness.metrics import value
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.worker.conftest import settings_with
from worker import metrics
from worker.reconciliation.loop import Discrepancies
from worker.settings import WorkerSettings


@pytest.fixture
async def looking_elsewhere(
    worker_settings: WorkerSettings, postgres_link: TcpProxy
) -> AsyncIterator[asyncio.Task[None]]:
    """A look of another replica, in progress: it has the lock, and its first check is held back."""
    postgres_link.hold_before(b"count(*) OVER ()")
    settings = settings_with(worker_settings, database_url=postgres_link.url)
    async with postgres.open_pool(settings) as pool:
        looking = asyncio.create_task(Discrepancies(settings, pool).look())
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
    worker_settings: WorkerSettings,
    pool: Pool,
    postgres_link: TcpProxy,
    looking_elsewhere: asyncio.Task[None],
) -> None:
    discrepancies = Discrepancies(worker_settings, pool)
    while_other_looks = await has_looked(discrepancies)
    postgres_link.resume()
    await looking_elsewhere

    assert not while_other_looks
    assert await has_looked(discrepancies)


@pytest.mark.parametrize("way", ["dies", "vanishes"])
@pytest.mark.usefixtures("looking_elsewhere")
async def test_replica_looks_once_the_one_that_was_looking_is_gone(
    worker_settings: WorkerSettings, pool: Pool, postgres_link: TcpProxy, way: str
) -> None:
    """With its machine, it vanishes without closing the connection: Postgres gives up after some seconds."""
    discrepancies = Discrepancies(worker_settings, pool)
    before = await has_looked(discrepancies)
    if way == "dies":
        await postgres_link.cut()

    await eventually(lambda: has_looked(discrepancies))

    assert not before
