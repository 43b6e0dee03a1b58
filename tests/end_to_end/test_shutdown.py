"""SIGTERM: work in progress is finished, and nothing that was accepted is lost."""

import asyncio
import time

from msgspec.structs import replace

from tests.deploy.manifests import grace_seconds
from tests.end_to_end.callers import client_of, create_many, under_load
from tests.end_to_end.events import Subscriber
from tests.harness.databases import has_waiting_statement
from tests.harness.examples import A_REQUEST
from tests.harness.processes import api_process, started
from tests.harness.waiting import eventually

_GRACE_SECONDS = 15.0  # less than the 20 of SHUTDOWN_SECONDS, after which a process is cut off


async def test_processes_end_within_the_grace_period_and_lose_nothing_that_they_had_accepted(
    api, worker, issuer, database, subscriber
):
    async with started(api, worker), under_load(api, issuer.token(), callers=8) as load:
        await eventually(lambda: len(load.stored) >= 200)
        began_at = time.monotonic()
        statuses = await asyncio.gather(api.stop(), worker.stop())
        seconds = time.monotonic() - began_at
    rows = await database.fetch("SELECT external_id FROM calculation_request")
    stored = {row["external_id"] for row in rows}
    async with started(worker):  # The next pod.
        await eventually(lambda: _created(subscriber) >= len(stored))

    assert tuple(statuses) == (0, 0)
    assert seconds < min(_GRACE_SECONDS, grace_seconds())
    assert load.refused == []
    assert stored == load.stored, "each stored request was answered, and each answered one is stored"
    assert _created(subscriber) == len(stored)


def _created(subscriber: Subscriber) -> int:
    return sum(".request.created." in event for event in subscriber.event_ids)


async def test_api_ends_in_time_though_a_request_hangs_and_refuses_that_request(
    service_settings, issuer, database, tmp_path
):
    """The request would hang for ten minutes; the API is given one second."""
    api = api_process(
        replace(service_settings, database_timeout_seconds=600.0, shutdown_seconds=1.0), tmp_path
    )
    async with started(api), client_of(api, issuer.token()) as caller, database.transaction():
        await database.execute("LOCK TABLE calculation_request IN EXCLUSIVE MODE")
        hanging = asyncio.create_task(caller.post("/v1/request", json=A_REQUEST, timeout=60.0))
        await eventually(lambda: has_waiting_statement(database))
        status = await api.stop()
        answer = await hanging

    assert status == 0
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 0


async def test_worker_that_is_stopped_under_load_loses_and_repeats_nothing(
    api, worker, caller, subscriber, mail_server
):
    mail_server.data_delay_seconds = 0.02
    async with started(api, worker):
        records = await create_many(caller, 60)
        await eventually(lambda: len(mail_server.accepted) >= 10)
        began_at = time.monotonic()
        status = await worker.stop()
        seconds = time.monotonic() - began_at
        worker.start()
        await eventually(lambda: len(subscriber.event_ids) == 2 * 60)

    assert status == 0
    assert seconds < _GRACE_SECONDS
    assert sorted(mail.recipients[0] for mail in mail_server.accepted) == sorted(
        record["customer_email"] for record in records
    )
