"""A pod deleted under load: accepted requests are answered, and every event still arrives."""

import asyncio
import time
from pathlib import Path

from aio_pika.abc import AbstractChannel

from service.postgres.pool import Connection
from service.settings import ServiceSettings
from tests.deploy.manifests import grace_seconds
from tests.end_to_end.callers import under_load
from tests.end_to_end.events import Subscriber, subscribed
from tests.harness.issuer import Issuer
from tests.harness.processes import api_process, started, worker_process
from tests.harness.waiting import eventually
from worker.settings import WorkerSettings


async def test_processes_end_within_the_grace_period_and_lose_nothing_that_they_had_accepted(
    service_settings: ServiceSettings,
    worker_settings: WorkerSettings,
    issuer: Issuer,
    database: Connection,
    channel: AbstractChannel,
    tmp_path: Path,
) -> None:
    api, worker = api_process(service_settings, tmp_path), worker_process(worker_settings, tmp_path)
    async with subscribed(channel) as subscriber:
        async with started(api, worker), under_load(api, issuer.token(), callers=8) as load:
            await eventually(lambda: len(load.stored) >= 200)
            began_at = time.monotonic()
            statuses = await asyncio.gather(api.stop(), worker.stop())
            seconds = time.monotonic() - began_at
        rows = await database.fetch("SELECT external_id FROM calculation_request")
        stored = {row["external_id"] for row in rows}
        async with started(worker):  # The next pod.
            await eventually(lambda: _created(subscriber) >= len(stored))

    print(f"both ended after {seconds:.2f} seconds, {len(stored)} requests stored")  # noqa: T201 - figures
    assert tuple(statuses) == (0, 0)
    assert seconds < grace_seconds()
    assert load.refused == []
    assert stored == load.stored, "each stored request was answered, and each answered one is stored"
    assert _created(subscriber) == len(stored)


def _created(subscriber: Subscriber) -> int:
    return sum(".request.created." in event for event in subscriber.event_ids)
