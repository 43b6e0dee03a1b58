"""Fixtures: real servers, a database for each test, tokens, and settings of the processes."""

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import aio_pika
import hypothesis
import pytest

from deploy.local.machine.folders import LOCAL, Place
from deploy.local.servers import lookup as servers
from deploy.local.servers.rabbitmq_node import rabbitmq_node
from deploy.local.servers.server import Server
from service.addresses import EventLoop
from service.postgres.pool import open_pool
from tests.harness import databases, postfix
from tests.harness.certificates import Authority
from tests.harness.dovecot import Dovecot
from tests.harness.in_process import api_client
from tests.harness.issuer import Issuer, api_settings
from tests.harness.mail_server import MailServer
from tests.harness.processes import email_settings, environment_of
from tests.harness.servers import running_daemon, scratch_folder
from tests.harness.tcp_proxy import StatementLog, TcpProxy
from worker.rabbitmq import topology

hypothesis.settings.register_profile("repeatable", derandomize=True)
# A shell in the background lets its children ignore Ctrl-C, which tests send to theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)
LOGS: dict[str, Callable[[], str]] = {}  # the ends of those of the servers that this process started
# With STRICT_SKIPS set, any other reason to skip a test is a failure.
ALLOWED_SKIPS = (
    "neither kubectl nor kustomize is installed",  # Debian 12 has no package that renders the overlays.
    "curl is not installed",  # Only the tests of the calls on the pages need it.
    "jq is not installed",  # Only the test of `operate` needs it.
    "Chromium is missing",  # Not every system has a package of it.
    "Playwright is installed by `make test-long`",
    "Postfix starts only as root",  # Its processes switch to other users.
    "no Docker engine answers",  # CI needs none.
    "Docker Compose is not installed",
    "oidc-provider is not installed",  # `make test-long` installs it if there is node.
    "TypeScript is not installed",  # likewise
    "Java is not installed",  # Only the tests of openapi-generator need it.
    "AsyncAPI's parser is not installed",  # `make deploy-check` installs it, and runs its test.
)


def pytest_xdist_auto_num_workers() -> int:
    """Run the tests in one process if the servers are given, because their queues would be shared.

    Otherwise there are two for each processor, because tests wait half of the time.
    """
    return 0 if {"DATABASE_URL", "AMQP_URL"} & os.environ.keys() else 2 * (os.cpu_count() or 1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Let a failure end with its cause. A skip is a failure where none is expected."""
    report = yield
    is_skip = os.environ.get("STRICT_SKIPS") and report.skipped and not hasattr(report, "wasxfail")
    if is_skip and not any(reason in str(report.longrepr) for reason in ALLOWED_SKIPS):
        report.outcome = "failed"
    if report.failed:
        _shorten(report)
    return report


def _shorten(report: pytest.TestReport) -> None:
    """Move the output of a failed test, and the ends of the servers' logs, into a file that it names."""
    sections = [*report.sections, *((f"End of {name}'s log", end()) for name, end in LOGS.items())]
    name = re.sub(r"\W+", "-", f"{report.nodeid}-{report.when}")
    file = LOCAL / "failures" / f"{name[-200:]}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(f"{title}:\n{text}" for title, text in sections))
    # More than three lines would push the cause out of sight.
    short = [(title, text) for title, text in report.sections if len(text.splitlines()) <= 3]
    report.sections = [*short, ("Output, and the ends of the servers' logs", str(file))]


@pytest.fixture(scope="session")
def _asyncio_loop_factory():
    """Run the tests on the event loop that both processes use.

    pytest-asyncio's hook `pytest_asyncio_loop_factories` gives it to asynchronous tests only: their fixtures
    would be torn down by each of the other tests.
    """
    return EventLoop


@pytest.fixture(scope="session")
def postgres_server(request):
    """URL of a Postgres server whose user may create databases: given, or started for this process."""
    if any("amqp_url" in getattr(test, "fixturenames", ()) for test in request.session.items):
        request.getfixturevalue("broker_start")
    with scratch_folder() as folder, servers.postgres(Place(folder=folder)) as server:
        LOGS["Postgres"] = server.last_lines
        yield server.url


@pytest.fixture(scope="session")
def broker_start():
    """A RabbitMQ node, given or started for this process in a thread, while other tests run already."""
    with scratch_folder() as folder, ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        yield thread.submit(stack.enter_context, servers.rabbitmq(Place(folder=folder)))


@pytest.fixture(scope="session")
def amqp_url(broker_start: Future[Server]):
    server = broker_start.result()
    LOGS["RabbitMQ"] = server.last_lines
    return server.url


@pytest.fixture(scope="session")
def own_broker(broker_start: Future[Server]):
    """A RabbitMQ that a test may configure: a process here, even if other tests use another one."""
    server = broker_start.result()
    if server.process is not None:
        yield server
        return
    with scratch_folder() as folder, rabbitmq_node(Place(folder=folder)) as server:
        yield server


@pytest.fixture(scope="session")
async def administrator(postgres_server):
    async with databases.connected(postgres_server) as connection:
        yield connection


@pytest.fixture(scope="session")
async def template(postgres_server, administrator):
    """Name of a database with the schema and two conveyancers, from which each test's is copied."""
    name = f"template_{time.time_ns()}"
    await databases.create(administrator, name)
    async with databases.connected(databases.url_of(postgres_server, name)) as connection:
        await databases.prepare(connection)
    yield name
    await databases.drop(administrator, name)


@pytest.fixture
async def database_url(postgres_server, template, administrator):
    """URL of this test's database: the schema and two conveyancers."""
    async with databases.copied(administrator, postgres_server, template) as url:
        yield url


@pytest.fixture
async def database(database_url):
    async with databases.connected(database_url) as connection:
        yield connection


@pytest.fixture
async def other_connection(database_url):
    async with databases.connected(database_url) as connection:
        yield connection


@pytest.fixture(scope="session")
def issuer(tmp_path_factory):
    return Issuer(tmp_path_factory.mktemp("issuer"))


@pytest.fixture
def own_issuer(tmp_path):
    return Issuer(tmp_path)


@pytest.fixture
def authority(tmp_path, monkeypatch):
    """A certificate authority that this process trusts."""
    made = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.file))
    return made


@pytest.fixture
def statements():
    """The statements that reach Postgres over `link`."""
    return StatementLog()


@pytest.fixture
async def link(database_url, statements):
    """The API's way to the test's database, which the test can cut, and on which statements are recorded."""
    async with TcpProxy(databases.as_role(database_url, "api"), statements.watch) as forwarder:
        yield forwarder


@pytest.fixture
def service_settings(database_url, issuer):
    return api_settings(databases.as_role(database_url, "api"), issuer)


@pytest.fixture
def environment(service_settings):
    """The environment of operators' commands, with the settings of the API."""
    database_url = databases.as_role(service_settings.database_url, "operator")
    return environment_of(service_settings, DATABASE_URL=database_url)


@pytest.fixture
async def client(service_settings, issuer):
    """A client of the API with a token of CONVEYANCER."""
    async with api_client(service_settings, issuer.token()) as connected:
        yield connected


@pytest.fixture
async def channel(amqp_url):
    """A channel to a broker with the topology declared and every queue empty."""
    async with await aio_pika.connect(amqp_url) as connection:
        if await topology.ensure(connection):  # A test declared something with other properties.
            async with connection.channel() as channel:
                for queue in topology.QUEUES:
                    await channel.queue_delete(queue.name)
                    await channel.queue_delete(queue.dead_letters)
                for exchange in topology.EXCHANGES:
                    await channel.exchange_delete(exchange)
            await topology.ensure(connection)
        opened = await connection.channel()
        for queue in topology.QUEUES:
            for name in (queue.name, queue.dead_letters):
                await (await opened.get_queue(name, ensure=False)).purge()
        yield opened


@pytest.fixture
async def mail_server():
    """A real SMTP server whose replies the test decides."""
    async with MailServer() as server:
        yield server


@pytest.fixture
def mailbox(authority):
    """The mailbox of MAIL_FROM, on a real IMAP server."""
    with running_daemon(Dovecot, authority) as server:
        yield server


@pytest.fixture
async def mail_system(authority):
    """A real relay, customers' mail servers whose replies the test decides, and the mailbox of MAIL_FROM."""
    async with postfix.mail_system(authority) as system:
        yield system


@pytest.fixture
def worker_settings(database_url, amqp_url, channel, mail_server):  # noqa: ARG001 - channel prepares the broker
    """Settings of a worker on the test's database, broker and mail server."""
    return email_settings(
        database_url=databases.as_role(database_url, "worker"),
        amqp_url=amqp_url,
        smtp_url=mail_server.url,
        email_retry_seconds=0.05,
        smtp_timeout_seconds=5.0,
        relay_poll_seconds=0.05,
    )


@pytest.fixture
async def pool(worker_settings):
    async with open_pool(worker_settings) as opened:
        yield opened
