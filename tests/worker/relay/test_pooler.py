"""The whole worker behind PgBouncer in transaction mode, with a direct connection only for LISTEN."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

import aio_pika
import httpx
import msgspec
import pytest
from aio_pika.abc import AbstractChannel

from deploy.local.errors import LocalStackError
from deploy.local.machine import packages
from deploy.local.machine.ports import accepts, free_port
from deploy.local.machine.processes import Program, running
from deploy.local.machine.waiting import wait_until
from service.calculation_requests.model import CalculationRequest
from service.outbox.waker import RelayWaker
from service.postgres import loans
from service.postgres.pool import Connection, Pool, open_pool
from service.settings import ServiceSettings
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_client
from tests.harness.in_process import running as running_parts
from tests.harness.issuer import Issuer
from tests.harness.mail_server import MailServer
from tests.harness.waiting import eventually
from tests.worker.conftest import store
from worker.process import ROLES, assemble
from worker.rabbitmq import topology
from worker.settings import WorkerSettings

pytestmark = pytest.mark.long

_NOBODY = 65534


@pytest.fixture
def pooler_url(database_url: str, tmp_path: Path) -> Iterator[str]:
    """The URL of the test's database through a PgBouncer with three connections."""
    try:
        pgbouncer = packages.command("pgbouncer", package="pgbouncer", report=print)
    except LocalStackError as reason:
        pytest.skip(f"PgBouncer is missing: {reason}")
    port = free_port()
    database = urlsplit(database_url)
    tmp_path.chmod(0o755)
    config = tmp_path / "pgbouncer.ini"
    config.write_text(
        f"""
        [databases]
        * = host={database.hostname} port={database.port} user={database.username} \
            password={unquote(database.password or "")}
        [pgbouncer]
        listen_addr = 127.0.0.1
        listen_port = {port}
        unix_socket_dir =
        auth_type = any
        pool_mode = transaction
        default_pool_size = 3
        """.replace("            password", " password").replace("\n        ", "\n")
    )
    config.chmod(0o644)
    program = Program(
        name="PgBouncer",
        command=[*_as_another_user(), *pgbouncer, str(config)],
        environment=os.environ,
        folder=Path("/"),
        log=tmp_path / "pgbouncer.log",
        stop_seconds=5.0,
    )
    with running(program) as process:
        assert wait_until(lambda: accepts(port), seconds=30), process.describe("PgBouncer does not answer.")
        yield urlunsplit(database._replace(netloc=f"{database.username}@127.0.0.1:{port}"))


def _as_another_user() -> list[str]:
    """Return the prefix for programs that refuse to run as root."""
    if os.geteuid() != 0:
        return []
    return [
        "setpriv",
        f"--reuid={_NOBODY}",
        f"--regid={_NOBODY}",
        "--clear-groups",
        "--inh-caps=+dac_override",
        "--ambient-caps=+dac_override",
        "--securebits=+no_setuid_fixup",
    ]


async def _store(pool: Pool) -> CalculationRequest:
    async with loans.connection(pool, seconds=5.0) as connection:
        return await store(connection)


async def test_two_workers_work_through_a_transaction_pooler(
    worker_settings: WorkerSettings,
    database_url: str,
    pooler_url: str,
    database: Connection,
    channel: AbstractChannel,
    mail_server: MailServer,
) -> None:
    settings = msgspec.structs.replace(
        worker_settings,
        database_url=pooler_url,
        listen_database_url=database_url,
        database_statement_cache_size=0,
    )
    async with open_pool(settings) as pool:
        waker = RelayWaker(pool, timeout_seconds=5.0)
        parts = [
            part for _ in range(2) for part in assemble(settings, pool, frozenset(ROLES), waker)[0].values()
        ]
        async with running_parts(*parts):
            async with asyncio.TaskGroup() as group:
                inserts = [group.create_task(_store(pool)) for _ in range(50)]
            requests = [insert.result() for insert in inserts]
            exchange = await channel.get_exchange(topology.CALCULATIONS, ensure=False)
            for request in requests:
                body = msgspec.json.encode(
                    {"request_uuid": request.uuid, "calculation_id": f"of-{request.uuid}"}
                )
                await exchange.publish(aio_pika.Message(body), "calculation.created")

            async def all_done() -> bool:
                return bool(
                    await database.fetchval(
                        """
                        SELECT count(*) = 50 AND (SELECT count(*) = 0 FROM outbox)
                          FROM calculation_request AS request
                          JOIN email
                            ON email.request_id = request.id
                         WHERE email.state = 'sent'
                           AND request.calculation_id IS NOT NULL
                           AND request.sequence = 3
                        """
                    )
                )

            await eventually(all_done)

    assert len(mail_server.accepted) == 50


@pytest.fixture
async def pooled_client(
    service_settings: ServiceSettings, issuer: Issuer, pooler_url: str
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an API behind the pooler."""
    settings = msgspec.structs.replace(
        service_settings,
        database_url=pooler_url,
        database_statement_cache_size=0,
        database_timeout_seconds=30,
    )
    async with api_client(settings, issuer.token()) as client:
        yield client


async def test_creates_wait_for_an_idempotency_key_through_a_transaction_pooler(
    pooled_client: httpx.AsyncClient, database: Connection
) -> None:
    sent = [
        pooled_client.post("/v1/request", json=A_REQUEST, headers={"Idempotency-Key": f"key-{number % 3}"})
        for number in range(60)
    ]
    responses = await asyncio.gather(*sent)
    listed = (await pooled_client.get("/v1/request")).json()["data"]["requests"]

    assert {response.status_code for response in responses} == {200}
    assert sum("Idempotent-Replayed" not in response.headers for response in responses) == 3
    assert len(listed) == await database.fetchval("SELECT count(*) FROM outbox") == 3


async def test_creates_share_transactions_through_a_transaction_pooler(
    pooled_client: httpx.AsyncClient, database: Connection
) -> None:
    body = A_REQUEST | {"notes": "x" * 9_000}
    for _ in range(5):
        responses = await asyncio.gather(*(pooled_client.post("/v1/request", json=body) for _ in range(60)))
        assert {response.status_code for response in responses} == {200}

    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 300
    assert await database.fetchval("SELECT count(*) FROM outbox") == 300
    transactions = await database.fetchval("SELECT count(DISTINCT xmin::text) FROM outbox")
    assert transactions < 300
