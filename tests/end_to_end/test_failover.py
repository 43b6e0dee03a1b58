"""Postgres fails over, and loses nothing that was answered or recorded; or it is behind PgBouncer."""

import asyncio
import os
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from yarl import URL

from deploy.local.machine.ports import accepts, free_port
from service.calculation_requests import erasing, event_history
from service.calculation_requests.email_changes import EmailEnd, EmailId, FirstEmail, add_first
from service.calculation_requests.model import CalculationRequest, Idempotency
from service.calculation_requests.storing import Storage
from service.command_line import connecting
from service.outbox.waking import RelayWaker
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool, open_pool
from tests.deploy.manifests import K8S
from tests.end_to_end.parties import ALL_ARE_DONE, client_of, create, create_if_possible, publish_calculation
from tests.harness import databases
from tests.harness.examples import A_REQUEST, CONVEYANCER
from tests.harness.in_process import api_client
from tests.harness.processes import Process, api_process, bare_environment, started, worker_process
from tests.harness.programs import configuration, debian_program
from tests.harness.standby import replicated
from tests.harness.stored import insert, new_request
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from worker.consumers.calculations import Result, record_results
from worker.mail import ledger


@pytest.fixture
async def servers():
    async with replicated() as started:
        yield started


async def store(pool: Pool, request: CalculationRequest, seconds: float) -> None:
    storage = Storage(pool, RelayWaker(pool, seconds=seconds), seconds=seconds)
    await storage.store(request, Idempotency("key", b"body"), None, time.monotonic() + seconds)


async def record_email(pool: Pool, request: CalculationRequest, seconds: float) -> None:
    async with connections.acquired(pool, seconds=seconds) as connection:
        await add_first(connection, [FirstEmail(request.id)])


async def record_end(pool: Pool, request: CalculationRequest, seconds: float) -> None:
    async with connections.transaction(pool, seconds=seconds) as connection:
        sent = EmailEnd(EmailId(request.id, 1, "invitation"), "250 OK")
        assert await ledger.record_ends(connection, [sent]) == [None]


async def record_result(pool: Pool, request: CalculationRequest, seconds: float) -> None:
    async with connections.transaction(pool, seconds=seconds) as connection:
        assert await record_results(connection, [Result(request.id, "calculation")]) == [None]


async def erase(pool: Pool, request: CalculationRequest, seconds: float) -> None:
    async with (
        connections.acquired(pool, seconds=seconds) as connection,
        connecting.bounded_transaction(connection),
    ):
        await erasing.erase(connection, [request.id])


_WORKS = (store, record_email, record_end, record_result, erase)
_WORKS_ARE_DONE = """
    SELECT EXISTS (SELECT FROM calculation_request WHERE id = $1)
       AND EXISTS (SELECT FROM email WHERE request_id = $2)
       AND EXISTS (SELECT FROM email WHERE request_id = $3 AND state = 'sent')
       AND EXISTS (SELECT FROM calculation_request WHERE id = $4 AND calculation_id IS NOT NULL)
       AND NOT EXISTS (SELECT FROM calculation_request WHERE id = $5)
"""


async def test_work_is_done_only_once_a_standby_has_it_and_is_there_after_a_failover(
    servers, service_settings
):
    """Even if an earlier attempt has committed it, without the standby, and another session locks a row."""
    requests = [new_request() for _ in _WORKS]

    async def attempt(pool: Pool, seconds: float) -> list[str]:
        works = (work(pool, request, seconds) for work, request in zip(_WORKS, requests, strict=True))
        return [repr(outcome) for outcome in await asyncio.gather(*works, return_exceptions=True)]

    async def are_done(pool: Pool) -> bool:
        with suppress(PostgresUnavailable):
            async with connections.acquired(pool, seconds=0.5) as connection:
                return bool(await connection.fetchval(_WORKS_ARE_DONE, *(each.id for each in requests)))
        return False

    async with open_pool(replace(service_settings, database_url=servers.url)) as pool:
        async with connections.acquired(pool, seconds=10) as connection:
            for request in requests[1:]:
                await insert(connection, request)
            await add_first(connection, [FirstEmail(requests[2].id)])
        await servers.cut_off()
        attempts = []
        for _ in range(2):
            attempts.append(await attempt(pool, seconds=0.5))
            await servers.end_waits()
        async with databases.connected(servers.primary_url) as other:
            await other.execute("BEGIN")  # It ends with the connection: a COMMIT would wait, too.
            # `record_end` skips this request, and finds that the e-mail has ended.
            await other.execute("SELECT FROM calculation_request WHERE id = $1 FOR UPDATE", requests[2].id)
            attempts.append(await attempt(pool, seconds=0.5))
            await servers.end_waits()
        await servers.admit()
        attempts.append(await attempt(pool, seconds=30))
        await servers.fail_over()
        await eventually(lambda: are_done(pool))

    unavailable, done = ["PostgresUnavailable()"] * len(_WORKS), ["None"] * len(_WORKS)
    assert attempts == [unavailable, unavailable, unavailable, done]


async def test_feed_is_not_read_from_a_standby_and_begins_anew_after_a_failover(
    servers, service_settings, issuer
):
    async with databases.connected(servers.primary_url) as primary:
        page = await event_history.read_feed(primary, CONVEYANCER, after="", limit=1)
    settings = replace(service_settings, database_url=servers.standby_url)
    async with api_client(settings, issuer.token()) as client:

        async def is_refused_with(status: int) -> bool:
            return (await client.get("/v1/event", params={"after": page.after})).status_code == status

        assert (await client.get("/v1/request")).status_code == 200
        assert await is_refused_with(503)
        await servers.fail_over()
        await eventually(lambda: is_refused_with(410))


_AS_ANOTHER_USER = [] if os.geteuid() else ["--user", "nobody"]  # PgBouncer refuses to run as root


def pgbouncer(database_url: str, folder: Path) -> Process:
    """Return a PgBouncer, not yet started, with three connections for each user."""
    command, port = debian_program("pgbouncer"), free_port()
    folder.chmod(0o755)
    settings, users = folder / "pgbouncer.ini", folder / "users.txt"
    users.write_text("".join(f'"{databases.user_of(role)}" "made-up"\n' for role in databases.ROLES))
    server, production = URL(database_url), K8S / "overlays" / "production" / "postgres.yaml"
    objects = map(msgspec.yaml.decode, production.read_text().split("\n---\n"))
    (pooler,) = (each["spec"]["pgbouncer"] for each in objects if each["kind"] == "Pooler")
    given = {"host": server.host, "server_port": server.port, "users": users, "port": port}
    given["retry"] = pooler["parameters"]["server_login_retry"]
    settings.write_text(configuration("pgbouncer.ini", **given))
    for file in (settings, users):
        file.chmod(0o644)
    command += [*_AS_ANOTHER_USER, str(settings)]
    return Process("pgbouncer", command, environment=bare_environment(), port=port, folder=folder)


@asynccontextmanager
async def pooled(database_url: str, folder: Path):
    """Run it; yields the variables with which each process uses it."""
    process = pgbouncer(database_url, folder)
    url = str(URL(database_url).with_host("127.0.0.1").with_port(process.port))
    async with started(process, ready=False):
        await eventually(lambda: accepts(process.port))
        yield {
            role: {"DATABASE_URL": databases.as_role(url, role), "DATABASE_STATEMENT_CACHE_SIZE": "0"}
            for role in ("api", "worker")
        }


@pytest.mark.long
async def test_chain_works_through_a_transaction_pooler_with_direct_connections_only_for_listen(
    *, service_settings, worker_settings, database_url, database, channel, mail_server, issuer, tmp_path
):
    directly = {"LISTEN_DATABASE_URL": worker_settings.database_url}
    async with pooled(database_url, tmp_path) as of:
        api = api_process(service_settings, tmp_path, **of["api"], DATABASE_TIMEOUT_SECONDS="30")
        workers = [worker_process(worker_settings, tmp_path, **of["worker"], **directly) for _ in range(2)]
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


@pytest.mark.long
async def test_api_answers_soon_after_a_switchover(service_settings, database_url, issuer, tmp_path):
    async with TcpProxy(database_url) as postgres, pooled(postgres.url, tmp_path) as of:
        api = api_process(service_settings, tmp_path, **of["api"], DATABASE_TIMEOUT_SECONDS="1")
        async with started(api), client_of(api, issuer.token()) as caller:
            await create(caller)
            await postgres.refuse()
            assert await create_if_possible(caller) is None
            await eventually(lambda: postgres.refused)
            postgres.admit()
            admitted = time.monotonic()
            await eventually(lambda: create_if_possible(caller))
            waited = time.monotonic() - admitted

    assert waited < 8, "PgBouncer's own default makes this fifteen seconds"
