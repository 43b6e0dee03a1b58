"""What commands that change something have in common: they wait for locks, and vanish without holding any."""

import asyncio

from service.calculation_requests.model import CalculationRequest
from service.outbox import lanes
from service.postgres.pool import Connection
from tests.harness.databases import has_waiting_statement
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.worker.conftest import settings_with
from tests.worker.operating.test_erase import erase, run_erase
from worker.relay.lanes import lock_lanes
from worker.settings import WorkerSettings


async def test_lane_held_by_a_relay_is_waited_for(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    async with database.transaction():
        assert (await lock_lanes(database, [lanes.lane_of(stored_request.id)])).lanes
        erasing = asyncio.create_task(erase(worker_settings, stored_request))
        await eventually(lambda: has_waiting_statement(database))
        assert not erasing.done()

    assert not (await erasing).was_erased_before


async def test_lane_is_free_again_soon_after_an_operator_vanished(
    worker_settings: WorkerSettings,
    database: Connection,
    postgres_link: TcpProxy,
    stored_request: CalculationRequest,
) -> None:
    """For instance with its machine: TCP would notice after two hours."""
    away = settings_with(worker_settings, database_url=postgres_link.url)
    postgres_link.hold_before(b"INSERT INTO operator_action")
    erasing = asyncio.create_task(run_erase(away, stored_request.uuid))
    await postgres_link.marker_reached.wait()

    async def lane_is_free() -> bool:
        async with database.transaction():
            return bool((await lock_lanes(database, [lanes.lane_of(stored_request.id)])).lanes)

    was_free = await lane_is_free()
    await eventually(lane_is_free)
    await postgres_link.cut()

    assert not was_free
    assert (await erasing).status == 1
    assert await database.fetchval("SELECT id FROM calculation_request") == stored_request.id
