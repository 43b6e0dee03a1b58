"""SIGTERM: work in progress is finished, and nothing that was accepted is lost."""

import asyncio
import time
from contextlib import suppress

import httpx

from tests.deploy.manifests import grace_seconds
from tests.end_to_end.callers import another_request, answers, create
from tests.harness.processes import started
from tests.harness.waiting import eventually

_GRACE_SECONDS = 15.0  # less than the 20 of SHUTDOWN_SECONDS, after which a process is cut off


async def test_processes_end_within_the_grace_period_and_lose_and_repeat_nothing_that_they_had_accepted(
    *, api, worker, caller, database, subscriber, mail_server
):
    answers: list[httpx.Response] = []

    async def create_until_the_api_is_gone() -> None:
        with suppress(httpx.TransportError):
            while True:
                answers.append(await caller.post("/v1/request", json=another_request()))

    async with started(api, worker), asyncio.TaskGroup() as callers:
        for _ in range(8):
            callers.create_task(create_until_the_api_is_gone())
        await eventually(lambda: len(answers) >= 100 and mail_server.accepted)
        began_at = time.monotonic()
        statuses = await asyncio.gather(api.stop(), worker.stop())
        seconds = time.monotonic() - began_at
    rows = await database.fetch("SELECT external_id, customer_email FROM calculation_request")
    mailed_before = len(mail_server.accepted)
    async with started(worker):  # The next pod.
        await eventually(lambda: len(subscriber.event_ids) >= 2 * len(rows))

    assert tuple(statuses) == (0, 0)
    assert seconds < min(_GRACE_SECONDS, grace_seconds())
    assert {answer.status_code for answer in answers} == {200}
    answered = {answer.json()["data"]["external_id"] for answer in answers}
    assert answered == {row["external_id"] for row in rows}, "each stored one was answered, and the reverse"
    assert mailed_before < len(rows), "the worker was stopped while e-mails were due"
    recipients = [mail.recipients[0] for mail in mail_server.accepted]
    assert sorted(recipients) == sorted(row["customer_email"] for row in rows)


async def test_api_that_stops_is_alive_and_not_ready_and_still_serves(api, caller):
    async with started(api), httpx.AsyncClient(base_url=api.probes_url) as probes:
        api.terminate()
        await eventually(lambda: answers(probes, "/readyz", 503))
        is_alive, created = await answers(probes, "/livez", 200), await create(caller)
        status = await api.exit_status()

    assert (is_alive, bool(created), status) == (True, True, 0)
