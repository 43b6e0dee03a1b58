"""Fixtures: an API and a worker as processes, a caller, and another team's subscription."""

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path

import httpx
import pytest
from aio_pika.abc import AbstractChannel

from deploy.local.machine.folders import Place
from deploy.local.servers.rabbitmq_node import rabbitmq_node
from deploy.local.servers.server import Server
from service.settings import ServiceSettings
from tests.end_to_end.callers import client_of
from tests.end_to_end.events import Subscriber
from tests.harness import scratch
from tests.harness.issuer import Issuer
from tests.harness.processes import (
    Process,
    api_process,
    worker_process,
)
from worker.rabbitmq import topology
from worker.settings import WorkerSettings


@pytest.fixture(scope="session")
def own_broker(broker_start: Future[Server]) -> Iterator[Server]:
    """A RabbitMQ that a test may configure: a process here, even if other tests use another one."""
    server = broker_start.result()
    if server.process is not None:
        yield server
        return
    with scratch.folder() as folder, rabbitmq_node(Place(folder=folder)) as server:
        yield server


@pytest.fixture
def api(service_settings: ServiceSettings, tmp_path: Path) -> Process:
    """An API on the test's database, not yet started."""
    return api_process(service_settings, tmp_path)


@pytest.fixture
def apis(service_settings: ServiceSettings, tmp_path: Path) -> list[Process]:
    """Two APIs on the test's database, not yet started, which end within five seconds."""
    return [api_process(service_settings, tmp_path, SHUTDOWN_SECONDS="5") for _ in range(2)]


@pytest.fixture
def worker(worker_settings: WorkerSettings, tmp_path: Path) -> Process:
    """A worker on the test's servers, not yet started."""
    return worker_process(worker_settings, tmp_path)


@pytest.fixture
async def caller(api: Process, issuer: Issuer) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the API with a token of CONVEYANCER."""
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
