"""Processes on machines whose clocks are days ahead or behind: only Postgres's clock dates a request."""

import re

import httpx
import msgspec
import pytest

from tests.harness import metrics, stored
from tests.harness.processes import environment_of, run_process, started, worker_process
from tests.harness.programs import clock_off_by
from tests.harness.waiting import eventually

DAYS = 30  # RETENTION_DAYS


@pytest.mark.parametrize("days", [DAYS + 1, 400, -DAYS - 1])
async def test_worker_whose_clock_is_wrong_erases_nothing_and_says_why(
    worker_settings, database, tmp_path, mail_server, days
):
    for _ in range(5):
        assert await stored.insert(database, stored.new_request())
    clock = clock_off_by(days)
    worker = worker_process(worker_settings, tmp_path, RETENTION_DAYS=str(DAYS), **clock)
    async with started(worker), httpx.AsyncClient(base_url=worker.base_url) as client:
        await eventually(lambda: len(mail_server.accepted) == 5)
        ready, figures = await client.get("/readyz"), await metrics.scrape(client)
    doctor = await run_process("worker", "doctor", environment=environment_of(worker_settings, **clock))

    says = "this machine's clock shows "
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 5
    refusals = [line for line in worker.log.read_text().splitlines() if "retention_refused" in line]
    assert [msgspec.json.decode(line)["level"] for line in refusals] == ["warning"]
    assert says in refusals[0]
    assert ready.status_code == 200
    assert says in ready.json()["postgres"]
    for name in ("relay_delivery_seconds_sum", "email_delivery_seconds_sum"):
        assert 0 < figures[metrics.series(name)] < 300, name
    assert doctor.status == 1
    assert re.search(f"wrong +clock +{says}", doctor.output)
