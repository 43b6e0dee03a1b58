"""Processes on machines whose clocks are days ahead or behind: only Postgres's clock dates a request."""

import re
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID

import httpx
import msgspec
import pytest

from service.postgres.pool import Connection
from tests.end_to_end.callers import another_request, client_of
from tests.harness import metrics, stored
from tests.harness.processes import api_process, environment_of, run_process, started, worker_process
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


@pytest.mark.parametrize("days", [DAYS + 1, -DAYS - 1])
async def test_request_from_an_api_whose_clock_is_wrong_is_dated_by_postgres_and_kept(
    service_settings, worker_settings, issuer, database, tmp_path, days
):
    old = stored.new_request()
    assert await stored.insert(database, old)
    await database.execute("UPDATE calculation_request SET created_at = now() - interval '31 days'")
    api = api_process(service_settings, tmp_path, **clock_off_by(days))
    relay = worker_process(worker_settings, tmp_path, "relay", RETENTION_DAYS=str(DAYS))
    token = issuer.token(exp=int(time.time()) + 2 * abs(days) * 86_400)
    async with started(api, relay), client_of(api, token) as caller:
        answer = (await caller.post("/v1/request", json=another_request())).json()["data"]
        events = (await caller.get(f"/v1/request/{answer['uuid']}/events")).json()["data"]["events"]
        ready = await caller.get(f"{api.probes_url}/readyz")
        await eventually(lambda: _is_erased(database, old.id))
        await relay.stop()
        async with started(relay):  # whose first round begins at once
            again = await caller.get(f"/v1/request/{answer['uuid']}")

    assert "this machine's clock shows" in ready.json()["postgres"]
    assert again.json()["data"] == answer
    assert answer["created_at"] == answer["updated_at"] == events[0]["time"]
    assert abs(datetime.fromisoformat(answer["created_at"]) - datetime.now(UTC)) < timedelta(minutes=2)


async def _is_erased(database: Connection, request_id: UUID) -> bool:
    return bool(await database.fetchval("SELECT count(*) FROM erased_request WHERE id = $1", request_id))
