"""Fixtures: an API and a worker as processes, a caller, and another team's subscription."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aio_pika.abc import AbstractChannel

from deploy.local.machine.ports import accepts, free_port
from service.authentication import api_keys
from service.postgres.pool import Connection
from service.settings import ServiceSettings
from tests.deploy.mail_catching import mail_catcher
from tests.end_to_end.parties import JourneyStack, Subscriber, client_of
from tests.harness import processes
from tests.harness.examples import CONVEYANCER
from tests.harness.issuer import Issuer
from tests.harness.processes import Process, api_process, started, worker_process
from tests.harness.waiting import eventually
from worker.rabbitmq import topology
from worker.settings import WorkerSettings


@pytest.fixture(scope="module")
async def chromium() -> AsyncIterator[Any]:
    from tests.harness import browser  # noqa: PLC0415 - only some tests need Playwright

    async with browser.running() as running:
        yield running


@pytest.fixture
def api(service_settings: ServiceSettings, tmp_path: Path) -> Process:
    """An API on the test's database, not yet started."""
    return api_process(service_settings, tmp_path)


@pytest.fixture
def worker(worker_settings: WorkerSettings, tmp_path: Path) -> Process:
    """A worker on the test's servers, not yet started."""
    return worker_process(worker_settings, tmp_path)


@pytest.fixture
async def caller(api: Process, issuer: Issuer) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(api, issuer.token()) as client:
        yield client


@pytest.fixture
async def subscriber(channel: AbstractChannel) -> AsyncIterator[Subscriber]:
    """Another team, subscribed to every event about requests."""
    team = Subscriber()
    queue = await channel.declare_queue(exclusive=True)
    await queue.bind(topology.REQUESTS, "#")
    await queue.consume(team.receive, no_ack=True)
    yield team
    await queue.delete(if_unused=False, if_empty=False)


@pytest.fixture
async def journey(
    *,
    service_settings: ServiceSettings,
    worker_settings: WorkerSettings,
    issuer: Issuer,
    database: Connection,
    tmp_path: Path,
) -> AsyncIterator[JourneyStack]:
    """The pages of `make run`, with the API, the worker and the mail catcher that they need."""
    port, mails = free_port(), tmp_path / "mails"
    with mail_catcher(mails) as smtp_port:
        app_url, smtp_url = f"http://127.0.0.1:{port}", f"smtp://127.0.0.1:{smtp_port}"
        api = api_process(service_settings, tmp_path, APP_URL=app_url)
        worker = worker_process(worker_settings, tmp_path, APP_URL=app_url, SMTP_URL=smtp_url)
        environment = processes.bare_environment(
            PORT=str(port),
            BASE_URL=api.base_url,
            ACCESS_TOKEN=issuer.token(),
            API_KEY=await api_keys.create(database, CONVEYANCER),
            MAIL_DIR=str(mails),
            APP_URL=app_url,
            CALCULATOR_AMQP_URL=worker_settings.amqp_url,
        )
        command = processes.python("deploy.local.journey")
        pages = Process("journey", command, environment=environment, port=port, folder=tmp_path)
        async with started(api, worker), started(pages, ready=False):
            await eventually(lambda: accepts(port))
            yield JourneyStack(pages, api, worker, mails, environment)
