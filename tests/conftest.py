"""Real servers, a database for each test, and callers with tokens."""

import asyncio
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aio_pika
import asyncpg
import httpx
import jwt
import pytest
from aio_pika.abc import AbstractChannel
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from litestar.types import ASGIApp

from deploy.local.servers import lookup as servers
from service.app import create_app
from service.calculation_requests import conveyancers
from service.postgres import pool as postgres
from service.postgres import schema
from service.postgres.pool import Connection, Pool
from service.server import http_server
from service.server.http_server import listen
from service.settings import ServiceSettings
from tests.certificates import Authority
from tests.mail_server import MailServer
from worker.rabbitmq import topology
from worker.settings import WorkerSettings

ROOT = Path(__file__).parent.parent
ISSUER = "https://issuer.test"
AUDIENCE = "calculation-requests"
SECRET_KEYS = "current:" + "A" * 43 + ",older:" + "B" * 43
CONVEYANCER = "acme-conveyancing"  # charges a calculation fee
FREE_CONVEYANCER = "free-conveyancing"  # does not

A_REQUEST: dict[str, Any] = {
    "customer_email": "ada@customer.example.com",
    "customer_first_name": "Ada",
    "customer_last_name": "Lovelace",
    "sender_email": "grace@firm.example.com",
    "sender_organization_name": "Hopper & Partners",
    "sender_first_name": "Grace",
    "sender_last_name": "Hopper",
    "case_ref": "12 High Street",
}

_database_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def both_servers() -> Iterator[servers.Servers]:
    """Postgres and RabbitMQ, found or started side by side."""
    with servers.both(ROOT / ".local" / "tests", keep=False, report=print) as both:
        yield both


@pytest.fixture(scope="session")
def postgres_server(both_servers: servers.Servers) -> str:
    """URL of a Postgres server whose user may create databases."""
    return both_servers.postgres.url


@pytest.fixture(scope="session")
def amqp_url(both_servers: servers.Servers) -> str:
    """URL of a RabbitMQ node."""
    return both_servers.rabbitmq.url


@pytest.fixture(scope="session")
async def administrator(postgres_server: str) -> AsyncIterator[Connection]:
    """A connection that makes databases."""
    connection = await asyncpg.connect(postgres_server)
    yield connection
    await connection.close()


@pytest.fixture(scope="session")
async def template(postgres_server: str, administrator: Connection) -> AsyncIterator[str]:
    """Name of a database with the schema and two conveyancers, from which each test's is copied."""
    name = f"template_{time.time_ns()}"
    await administrator.execute(f'CREATE DATABASE "{name}"')
    connection = await asyncpg.connect(_with_database(postgres_server, name))
    await schema.apply(connection)
    await conveyancers.add(connection, CONVEYANCER, name="Acme", charges_calculation_fee=True)
    await conveyancers.add(connection, FREE_CONVEYANCER, name="Free", charges_calculation_fee=False)
    await connection.close()
    yield name
    if "DATABASE_URL" not in os.environ:
        return  # The server goes, and its databases with it.
    made = await administrator.fetch("SELECT datname FROM pg_database WHERE starts_with(datname, $1)", name)
    for row in made:
        await administrator.execute(f'DROP DATABASE "{row["datname"]}" WITH (FORCE)')


@pytest.fixture
async def database_url(postgres_server: str, template: str, administrator: Connection) -> str:
    """URL of an empty database of this test's own."""
    name = f"{template}_{next(_database_numbers)}"
    await administrator.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    return _with_database(postgres_server, name)


def _with_database(url: str, name: str) -> str:
    return httpx.URL(url).copy_with(path=f"/{name}").__str__()


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Connection]:
    """A connection to look at the test's database with."""
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


class Issuer:
    """An OAuth 2.0 issuer: signs access tokens, publishes its key in a file."""

    def __init__(self, folder: Path) -> None:
        self.key: EllipticCurvePrivateKey = ec.generate_private_key(ec.SECP256R1())
        self.jwks = folder / "jwks.json"
        self.publish("local")

    def publish(self, key_id: str) -> None:
        """Write the JWK set, with the key under this id."""
        jwk = jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        self.jwks.write_text(json.dumps({"keys": [{**jwk, "kid": key_id, "use": "sig", "alg": "ES256"}]}))

    def token(
        self, client_id: str = CONVEYANCER, *, headers: dict[str, Any] | None = None, **claims: Any
    ) -> str:
        """Return a token, valid unless *claims* or *headers* say otherwise."""
        usual = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "client_id": client_id,
            "scope": "request:read request:write",
            "exp": int(time.time()) + 600,
        }
        every = {name: value for name, value in {**usual, **claims}.items() if value is not None}
        return jwt.encode(
            every, self.key, algorithm="ES256", headers={"typ": "at+jwt", "kid": "local", **(headers or {})}
        )


@pytest.fixture(scope="session")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    """The issuer that the service trusts."""
    return Issuer(tmp_path_factory.mktemp("issuer"))


@pytest.fixture
def own_issuer(tmp_path: Path) -> Issuer:
    """An issuer whose keys the test may change."""
    return Issuer(tmp_path)


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """An authority that this process trusts."""
    made = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.file))
    return made


@pytest.fixture
def service_settings(database_url: str, issuer: Issuer) -> ServiceSettings:
    """Settings of an API on the test's database."""
    return ServiceSettings(
        database_url=database_url,
        app_url="https://app.example.com",
        request_secret_keys=SECRET_KEYS,
        auth_issuer=ISSUER,
        auth_audience=AUDIENCE,
        auth_jwks_url=issuer.jwks.as_uri(),
    )


@asynccontextmanager
async def serve(app: ASGIApp, **limits: float) -> AsyncIterator[str]:
    """Serve *app* on a free port of the loopback; yields its base URL."""
    stop = asyncio.Event()
    with listen("127.0.0.1", 0) as listening:
        serving = asyncio.create_task(http_server.serve(app, listening, stop, shutdown_seconds=5.0, **limits))
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        stop.set()
        await serving


@asynccontextmanager
async def api_client(settings: ServiceSettings, token: str | None) -> AsyncIterator[httpx.AsyncClient]:
    """Serve an API with *settings*; yields a client of it that sends *token*."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limits = {"head_seconds": settings.http_head_seconds, "body_seconds": settings.http_body_seconds}
    async with (
        serve(create_app(settings), **limits) as base_url,
        httpx.AsyncClient(base_url=base_url, headers=headers, timeout=20.0) as client,
    ):
        yield client


@pytest.fixture
async def client(service_settings: ServiceSettings, issuer: Issuer) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the API with a token of CONVEYANCER."""
    async with api_client(service_settings, issuer.token()) as connected:
        yield connected


@pytest.fixture
async def channel(amqp_url: str) -> AsyncIterator[AbstractChannel]:
    """A channel to a broker on which our topology is freshly declared and every queue is empty."""
    connection = await aio_pika.connect(amqp_url)
    async with connection:
        opened = await connection.channel()
        for queue in (topology.NOTIFICATIONS, topology.CALCULATION_RESULTS):
            await opened.queue_delete(queue.name)
            await opened.queue_delete(queue.dead_letters)
        for exchange in (topology.REQUESTS, topology.CALCULATIONS, topology.DEAD_LETTERS):
            await opened.exchange_delete(exchange)
        await topology.declare(opened)
        yield opened


@pytest.fixture
async def mail_server() -> AsyncIterator[MailServer]:
    """A real SMTP server whose answers the test decides."""
    async with MailServer() as server:
        yield server


@pytest.fixture
def worker_settings(
    database_url: str,
    amqp_url: str,
    channel: AbstractChannel,  # noqa: ARG001 - its fixture prepares the broker
    mail_server: MailServer,
) -> WorkerSettings:
    """Settings of a worker on the test's database, broker and mail server."""
    return WorkerSettings(
        database_url=database_url,
        app_url="https://app.example.com",
        request_secret_keys=SECRET_KEYS,
        amqp_url=amqp_url,
        smtp_url=mail_server.url,
        mail_from="Calculations <calculations@service.example.com>",
        email_poll_seconds=0.2,
        email_retry_seconds=0.2,
        smtp_timeout_seconds=5.0,
        smtp_answer_seconds=5.0,
        relay_retry_seconds=0.2,
        relay_poll_seconds=0.2,
    )


@pytest.fixture
async def pool(worker_settings: WorkerSettings) -> AsyncIterator[Pool]:
    """The pool of a worker."""
    async with postgres.open_pool(worker_settings) as opened:
        yield opened


@asynccontextmanager
async def running(*parts: Callable[[asyncio.Event], Awaitable[None]]) -> AsyncIterator[None]:
    """Run parts of the worker until the block is left, and let them stop in order."""
    stop = asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(_run(part, stop))
        try:
            yield
        finally:
            stop.set()


async def _run(part: Callable[[asyncio.Event], Awaitable[None]], stop: asyncio.Event) -> None:
    await part(stop)


async def someone_waits(database: Connection) -> bool:
    """Whether a statement waits for the lock of another transaction."""
    waiting: bool = await database.fetchval(
        """
        SELECT EXISTS (
                   SELECT
                     FROM pg_locks
                    WHERE NOT granted
                      AND (database IS NULL
                           OR database = (SELECT oid FROM pg_database WHERE datname = current_database()))
               )
        """
    )
    return waiting


async def eventually(check: Callable[[], Any], *, seconds: float = 15.0) -> Any:
    """Return what *check* returns, or its coroutine, once that is true; fail after *seconds*."""
    deadline = time.monotonic() + seconds
    while True:
        result = check()
        if isinstance(result, Awaitable):
            result = await result
        if result:
            return result
        assert time.monotonic() < deadline, "this did not happen in time"
        await asyncio.sleep(0.01)
