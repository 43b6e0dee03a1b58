"""SIGTERM: what is in hand is finished, and nothing that was accepted is lost."""

import time

import httpx

from service.postgres import Connection
from tests.conftest import Issuer, eventually
from tests.end_to_end.callers import create_many, under_load
from tests.end_to_end.events import Subscriber
from tests.end_to_end.processes import Process, started
from tests.mail_server import MailServer

_GRACE_SECONDS = 8.0


async def test_idle_processes_end_with_status_0(api: Process, worker: Process) -> None:
    async with started(api, worker):
        began_at = time.monotonic()
        statuses = {"api": await api.stop(), "worker": await worker.stop()}

    assert statuses == {"api": 0, "worker": 0}
    assert time.monotonic() - began_at < _GRACE_SECONDS


async def test_every_answer_of_an_api_that_is_stopped_under_load_is_stored(
    api: Process, issuer: Issuer, database: Connection
) -> None:
    async with started(api), under_load(api, issuer.token()) as load:
        await eventually(lambda: len(load.stored) >= 50)
        began_at = time.monotonic()
        status = await api.stop()
        seconds = time.monotonic() - began_at

    rows = await database.fetch(
        """
        SELECT external_id
          FROM calculation_request
          JOIN outbox ON outbox.request_id = calculation_request.id
        """
    )
    assert status == 0
    assert seconds < _GRACE_SECONDS
    assert load.refused == []
    assert load.stored <= {row["external_id"] for row in rows}


async def test_worker_that_is_stopped_under_load_loses_and_repeats_nothing(
    api: Process,
    worker: Process,
    caller: httpx.AsyncClient,
    subscriber: Subscriber,
    mail_server: MailServer,
) -> None:
    mail_server.data_delay_seconds = 0.02
    async with started(api, worker):
        records = await create_many(caller, 60)
        await eventually(lambda: len(mail_server.accepted) >= 10)
        began_at = time.monotonic()
        status = await worker.stop()
        seconds = time.monotonic() - began_at
        worker.start()
        await eventually(lambda: len(subscriber.event_ids) == 2 * 60, seconds=30)

    assert status == 0
    assert seconds < _GRACE_SECONDS
    assert sorted(mail.recipients[0] for mail in mail_server.accepted) == sorted(
        record["customer_email"] for record in records
    )
