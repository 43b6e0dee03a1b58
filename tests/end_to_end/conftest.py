"""Fixtures: an API and a worker as processes, a caller, and another team's subscription."""

import pytest

from deploy.local.machine.ports import accepts, free_port
from service.authentication import api_keys
from tests.end_to_end.parties import JourneyStack, Subscriber, client_of
from tests.harness.examples import CONVEYANCER
from tests.harness.processes import Process, api_process, bare_environment, python, started, worker_process
from tests.harness.servers import mail_catcher
from tests.harness.waiting import eventually
from worker.rabbitmq import topology


@pytest.fixture(scope="module")
async def chromium():
    from tests.harness import browser  # noqa: PLC0415 - only some tests need Playwright

    async with browser.running() as running:
        yield running


@pytest.fixture
def api(service_settings, tmp_path):
    """An API on the test's database, not yet started."""
    return api_process(service_settings, tmp_path)


@pytest.fixture
def worker(worker_settings, tmp_path):
    """A worker on the test's servers, not yet started."""
    return worker_process(worker_settings, tmp_path)


@pytest.fixture
async def caller(api, issuer):
    """A client of the API with a token of CONVEYANCER."""
    async with client_of(api, issuer.token()) as client:
        yield client


@pytest.fixture
async def subscriber(channel):
    """Another team, subscribed to every event about requests."""
    team = Subscriber()
    queue = await channel.declare_queue(exclusive=True)
    await queue.bind(topology.REQUESTS, "#")
    await queue.consume(team.receive, no_ack=True)
    yield team
    await queue.delete(if_unused=False, if_empty=False)


@pytest.fixture
async def journey(service_settings, worker_settings, issuer, database, tmp_path):
    """The pages of `make run`, with the API, the worker and the mail catcher that they need."""
    port, mails = free_port(), tmp_path / "mails"
    with mail_catcher(mails) as smtp_port:
        app_url, smtp_url = f"http://127.0.0.1:{port}", f"smtp://127.0.0.1:{smtp_port}"
        api = api_process(service_settings, tmp_path, APP_URL=app_url)
        worker = worker_process(worker_settings, tmp_path, APP_URL=app_url, SMTP_URL=smtp_url)
        environment = bare_environment(
            PORT=str(port),
            BASE_URL=api.base_url,
            ACCESS_TOKEN=issuer.token(),
            API_KEY=await api_keys.create(database, CONVEYANCER),
            MAIL_DIR=str(mails),
            APP_URL=app_url,
            CALCULATOR_AMQP_URL=worker_settings.amqp_url,
        )
        program = python("deploy.local.journey")
        pages = Process("journey", program, environment=environment, port=port, folder=tmp_path)
        async with started(api, worker), started(pages, ready=False):
            await eventually(lambda: accepts(port))
            yield JourneyStack(pages, api, worker, mails, environment)
