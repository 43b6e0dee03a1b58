"""The API and two workers behind PgBouncer in transaction mode, with a direct connection only for LISTEN."""

import asyncio
import os
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

import pytest
from msgspec.structs import replace

from deploy.local.errors import LocalStackError
from deploy.local.machine import packages
from deploy.local.machine.ports import accepts, free_port
from deploy.local.machine.processes import Program, running
from deploy.local.machine.waiting import wait_until
from tests.end_to_end.callers import client_of
from tests.end_to_end.events import publish_calculation
from tests.harness.examples import A_REQUEST
from tests.harness.processes import api_process, started, worker_process
from tests.harness.waiting import eventually

pytestmark = pytest.mark.long

_NOBODY = 65534


@pytest.fixture
def pooler_url(database_url, tmp_path):
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


async def test_chain_works_through_a_transaction_pooler(
    *,
    service_settings,
    worker_settings,
    database_url,
    pooler_url,
    database,
    channel,
    mail_server,
    issuer,
    tmp_path,
):
    pooled = {"database_url": pooler_url, "database_statement_cache_size": 0}
    api = api_process(replace(service_settings, **pooled, database_timeout_seconds=30), tmp_path)
    settings = replace(worker_settings, **pooled, listen_database_url=database_url)
    workers = [worker_process(settings, tmp_path) for _ in range(2)]
    async with started(api, *workers), client_of(api, issuer.token()) as caller:
        sent = [
            caller.post("/v1/request", json=A_REQUEST, headers={"Idempotency-Key": f"key-{number % 50}"})
            for number in range(150)
        ]
        responses = await asyncio.gather(*sent)
        uuids = {response.json()["data"]["uuid"] for response in responses}
        for uuid in uuids:
            await publish_calculation(channel, uuid, f"of-{uuid}")

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

    assert {response.status_code for response in responses} == {200}
    assert sum("Idempotent-Replayed" not in response.headers for response in responses) == 50
    assert len(uuids) == len(mail_server.accepted) == 50
