"""Both processes: their settings at the bounds of libraries and protocols, too, and their end at SIGTERM."""

import asyncio
import time
from contextlib import suppress

import httpx
import msgspec
import pytest
from msgspec.inspect import FloatType, IntType, StructType, type_info

from service.settings import ServiceSettings
from tests.deploy.manifests import grace_seconds
from tests.end_to_end.parties import another_request, answers, client_of, complete, create
from tests.harness.processes import api_process, started, worker_process
from tests.harness.waiting import eventually
from worker.settings import EmailSettings

# Not at their bounds: the ports, and the time that the API goes on serving after SIGTERM.
_LEFT_OUT = {"PORT", "HEALTH_PORT", "SHUTDOWN_SECONDS"}
_SHUTDOWN_SECONDS = 10


def at_bounds(kind: type[msgspec.Struct], bound: str) -> dict[str, str]:
    """Return the variables of *kind* that have such a bound, at this bound."""
    described = type_info(kind)
    assert isinstance(described, StructType)
    numbers = {
        field.encode_name: getattr(each, bound)
        for field in described.fields
        for each in getattr(field.type, "types", [field.type])
        if isinstance(each, IntType | FloatType) and field.encode_name not in _LEFT_OUT
    }
    return {name: str(value) for name, value in numbers.items() if value is not None}


@pytest.mark.parametrize("bound", ["ge", "le"])
async def test_request_is_completed_with_every_number_at_its_bound(
    bound, service_settings, worker_settings, issuer, channel, subscriber, tmp_path
):
    api = api_process(service_settings, tmp_path, **at_bounds(ServiceSettings, bound))
    worker = worker_process(worker_settings, tmp_path, **at_bounds(EmailSettings, bound))

    async with started(api, worker), client_of(api, issuer.token()) as caller:
        await complete((await create(caller))["uuid"], channel, subscriber)


async def test_processes_end_in_time_serve_to_the_end_and_lose_and_repeat_nothing_that_they_had_accepted(
    *, service_settings, worker_settings, issuer, database, subscriber, mail_server, tmp_path
):
    api = api_process(service_settings, tmp_path, SHUTDOWN_SECONDS=str(_SHUTDOWN_SECONDS))
    worker = worker_process(worker_settings, tmp_path, SHUTDOWN_SECONDS=str(_SHUTDOWN_SECONDS))
    created: list[httpx.Response] = []

    async def create_until_the_api_is_gone() -> None:
        with suppress(httpx.TransportError):
            while True:
                created.append(await caller.post("/v1/request", json=another_request()))
                await asyncio.sleep(0.02)  # Each create costs an e-mail.

    async with (
        started(api, worker),
        httpx.AsyncClient(base_url=api.probes_url) as probes,
        client_of(api, issuer.token()) as caller,
        asyncio.TaskGroup() as callers,
    ):
        for _ in range(3):
            callers.create_task(create_until_the_api_is_gone())
        await eventually(lambda: len(created) >= 50 and mail_server.accepted)
        began_at = time.monotonic()
        api.terminate()
        worker.terminate()
        await eventually(lambda: answers(probes, "/readyz", 503))
        before_the_end = len(created)
        is_alive = await answers(probes, "/livez", 200)
        await eventually(lambda: len(created) > before_the_end + 3)
        statuses = await asyncio.gather(api.exit_status(), worker.exit_status())
        seconds = time.monotonic() - began_at
    rows = await database.fetch("SELECT external_id, customer_email FROM calculation_request")
    mailed_before = len(mail_server.accepted)
    async with started(worker):  # The next pod.
        await eventually(lambda: len(subscriber.event_ids) >= 2 * len(rows))

    assert (is_alive, *statuses) == (True, 0, 0)
    assert seconds < min(_SHUTDOWN_SECONDS, grace_seconds()), "a process is cut off then"
    assert {answer.status_code for answer in created} == {200}
    answered = {answer.json()["data"]["external_id"] for answer in created}
    assert answered == {row["external_id"] for row in rows}, "each stored one was answered, and the reverse"
    assert mailed_before < len(rows), "the worker was stopped while e-mails were due"
    recipients = [mail.recipients[0] for mail in mail_server.accepted]
    assert sorted(recipients) == sorted(row["customer_email"] for row in rows)
