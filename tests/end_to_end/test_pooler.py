"""The API and two workers behind PgBouncer in transaction mode, with a direct connection only for LISTEN."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from yarl import URL

from deploy.local.machine.ports import accepts, free_port
from tests.deploy.manifests import K8S
from tests.end_to_end.callers import client_of, create, create_if_possible
from tests.end_to_end.events import ALL_ARE_DONE, publish_calculation
from tests.harness import databases
from tests.harness.examples import A_REQUEST
from tests.harness.processes import Process, api_process, bare_environment, started, worker_process
from tests.harness.programs import debian_program
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually

pytestmark = pytest.mark.long

_AS_ANOTHER_USER = [] if os.geteuid() else ["--user", "nobody"]  # PgBouncer refuses to run as root


_SETTINGS = """
[databases]
* = host={server.host} port={server.port}
[pgbouncer]
unix_socket_dir =
auth_type = plain
auth_file = {users}
pool_mode = transaction
default_pool_size = 3
server_login_retry = {retry}
listen_addr = 127.0.0.1
listen_port = {port}
"""


def pgbouncer(database_url: str, folder: Path) -> Process:
    """Return a PgBouncer with three connections for each user, not yet started."""
    command, port = debian_program("pgbouncer"), free_port()
    folder.chmod(0o755)
    settings, users = folder / "pgbouncer.ini", folder / "users.txt"
    users.write_text("".join(f'"{databases.user_of(role)}" "made-up"\n' for role in databases.ROLES))
    server = URL(database_url)
    settings.write_text(_SETTINGS.format(server=server, users=users, retry=login_retry(), port=port))
    for file in (settings, users):
        file.chmod(0o644)
    command += [*_AS_ANOTHER_USER, str(settings)]
    return Process("pgbouncer", command, environment=bare_environment(), port=port, folder=folder)


@asynccontextmanager
async def pooler(database_url: str, folder: Path) -> AsyncIterator[str]:
    """Yield the URL of the database through a PgBouncer."""
    server = pgbouncer(database_url, folder)
    async with started(server, ready=False):
        await eventually(lambda: accepts(server.port))
        yield str(URL(database_url).with_host("127.0.0.1").with_port(server.port))


def login_retry() -> str:
    """Return `server_login_retry` of the pooler in the manifests. Needs no kustomize."""
    text = (K8S / "overlays" / "production" / "postgres.yaml").read_text()
    objects = [msgspec.yaml.decode(part) for part in text.split("\n---\n")]
    (found,) = (each["spec"] for each in objects if each["kind"] == "Pooler")
    return str(found["pgbouncer"]["parameters"]["server_login_retry"])


@pytest.fixture
async def pooler_url(database_url, tmp_path):
    async with pooler(database_url, tmp_path) as url:
        yield url


async def test_chain_works_through_a_transaction_pooler(
    *, service_settings, worker_settings, pooler_url, database, channel, mail_server, issuer, tmp_path
):
    pooled = {
        role: {"DATABASE_URL": databases.as_role(pooler_url, role), "DATABASE_STATEMENT_CACHE_SIZE": "0"}
        for role in ("api", "worker")
    }
    api = api_process(service_settings, tmp_path, **pooled["api"], DATABASE_TIMEOUT_SECONDS="30")
    directly = {"LISTEN_DATABASE_URL": worker_settings.database_url}
    workers = [worker_process(worker_settings, tmp_path, **pooled["worker"], **directly) for _ in range(2)]
    async with started(api, *workers), client_of(api, issuer.token()) as caller:
        sent = [
            caller.post("/v1/request", json=A_REQUEST, headers={"Idempotency-Key": f"key-{number % 50}"})
            for number in range(150)
        ]
        responses = await asyncio.gather(*sent)
        uuids = {response.json()["data"]["uuid"] for response in responses}
        for uuid in uuids:
            await publish_calculation(channel, uuid, f"of-{uuid}")
        await eventually(lambda: database.fetchval(ALL_ARE_DONE))

    assert {response.status_code for response in responses} == {200}
    assert sum("Idempotent-Replayed" not in response.headers for response in responses) == 50
    assert len(uuids) == len(mail_server.accepted) == 50


async def test_api_answers_soon_after_a_switchover(service_settings, database_url, issuer, tmp_path):
    async with TcpProxy(database_url) as postgres, pooler(postgres.url, tmp_path) as url:
        pooled = {"DATABASE_URL": databases.as_role(url, "api"), "DATABASE_STATEMENT_CACHE_SIZE": "0"}
        api = api_process(service_settings, tmp_path, **pooled, DATABASE_TIMEOUT_SECONDS="1")
        async with started(api), client_of(api, issuer.token()) as caller:
            await create(caller)
            await postgres.refuse()
            during = await caller.post("/v1/request", json=A_REQUEST)
            await eventually(lambda: postgres.refused)
            postgres.admit()
            admitted = time.monotonic()
            await eventually(lambda: create_if_possible(caller))
            waited = time.monotonic() - admitted

    assert during.status_code == 503
    assert waited < 8, "PgBouncer's own default makes this fifteen seconds"
