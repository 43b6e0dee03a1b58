"""The API and two workers behind PgBouncer in transaction mode, with a direct connection only for LISTEN."""

import asyncio
import os
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

from deploy.local.errors import LocalStackError
from deploy.local.machine import packages
from deploy.local.machine.ports import accepts, free_port
from deploy.local.machine.processes import Program, running, wait_for
from tests.end_to_end.callers import client_of
from tests.end_to_end.events import ALL_ARE_DONE, publish_calculation
from tests.harness import databases
from tests.harness.examples import A_REQUEST
from tests.harness.processes import api_process, started, worker_process
from tests.harness.waiting import eventually

pytestmark = pytest.mark.long

_AS_ANOTHER_USER = [] if os.geteuid() else ["--user", "nobody"]  # PgBouncer refuses to run as root


@pytest.fixture
def pooler_url(database_url, tmp_path):
    """The URL of the test's database through a PgBouncer with three connections for each user."""
    try:
        pgbouncer = packages.command("pgbouncer", package="pgbouncer")
    except LocalStackError as reason:
        pytest.skip(f"PgBouncer is missing: {reason}")
    port = free_port()
    database = urlsplit(database_url)
    tmp_path.chmod(0o755)
    config = tmp_path / "pgbouncer.ini"
    users = tmp_path / "users.txt"
    users.write_text("".join(f'"{databases.user_of(role)}" "made-up"\n' for role in databases.ROLES))
    users.chmod(0o644)
    server = f"host={database.hostname} port={database.port}"
    options = [
        "unix_socket_dir =",
        "auth_type = plain",
        f"auth_file = {users}",
        "pool_mode = transaction",
        "default_pool_size = 3",
    ]
    options += ["listen_addr = 127.0.0.1", f"listen_port = {port}"]
    lines = ["[databases]", f"* = {server}", "[pgbouncer]", *options, ""]
    config.write_text("\n".join(lines))
    config.chmod(0o644)
    program = Program(
        name="PgBouncer",
        command=[*pgbouncer, *_AS_ANOTHER_USER, str(config)],
        environment=os.environ,
        folder=Path("/"),
        log=tmp_path / "pgbouncer.log",
        stop_seconds=5.0,
    )
    with running(program) as process:
        wait_for(process, lambda: accepts(port), seconds=30)
        yield urlunsplit(database._replace(netloc=f"127.0.0.1:{port}"))


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
