"""Claims on e-mails, when Postgres itself was away: a server of the test's own is crashed and stopped."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest

from deploy.local.machine.folders import Place
from deploy.local.servers.postgres_process import postgres_process
from deploy.local.servers.server import Server
from service.postgres import schema
from service.postgres.pool import Connection
from tests.harness.waiting import eventually
from worker.mail import ledger


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A Postgres whose data survives its processes."""
    with postgres_process(Place(folder=tmp_path, keep=True, report=print)) as started:
        yield started


async def prepare(url: str) -> None:
    """Leave one e-mail that a process has claimed, and a Postgres that has been up for a while."""
    connection = await asyncpg.connect(url)
    await schema.apply(connection)
    await connection.execute(
        """
        INSERT INTO email (event_id, request_id, claimed_by, next_attempt_at)
        VALUES ('an-event', gen_random_uuid(), gen_random_uuid(), now() - interval '1 second')
        """
    )
    await connection.execute("UPDATE postgres_up SET since = now() - interval '1 day'")
    await connection.close()


async def reconnect(url: str) -> Connection:
    """Connect as soon as Postgres takes connections again."""

    async def connected() -> "Connection | None":
        with suppress(OSError, asyncpg.PostgresError):
            return await asyncpg.connect(url)
        return None

    connection: Connection = await eventually(connected, seconds=60)
    return connection


async def claims(connection: Connection, *, seconds: float) -> int:
    """Try to claim what is due, for so long; return how many e-mails that were."""
    return len(await ledger.claim(connection, uuid4(), under_way=[], limit=10, seconds=seconds))


async def uptime(connection: Connection) -> float:
    """Return for how many seconds the postmaster has run."""
    age: float = await connection.fetchval(
        "SELECT extract(epoch FROM now() - pg_postmaster_start_time())::float"
    )
    return age


async def test_claim_whose_time_has_run_out_is_taken_over(server: Server) -> None:
    await prepare(server.url)
    connection = await asyncpg.connect(server.url)

    assert await claims(connection, seconds=await uptime(connection) / 2) == 1
    await connection.close()


async def test_claims_are_left_alone_for_their_time_after_crash_recovery(server: Server) -> None:
    await prepare(server.url)
    victim, witness = await asyncpg.connect(server.url), await asyncpg.connect(server.url)
    started_at = await witness.fetchval("SELECT pg_postmaster_start_time()")
    os.kill(victim.get_server_pid(), signal.SIGKILL)
    await eventually(witness.is_closed)

    connection = await reconnect(server.url)
    seconds = await uptime(connection) / 2

    assert await connection.fetchval("SELECT pg_postmaster_start_time()") == started_at
    assert await claims(connection, seconds=seconds) == 0
    await eventually(lambda: claims(connection, seconds=0.1))
    await connection.close()


async def test_claims_are_left_alone_for_their_time_after_a_restart(server: Server) -> None:
    await prepare(server.url)
    assert server.process is not None
    await asyncio.to_thread(server.process.stop)
    server.process.restart()

    connection = await reconnect(server.url)

    assert await connection.fetchval("SELECT count(*) FROM postgres_up") == 1
    assert await claims(connection, seconds=60.0) == 0
    await connection.close()
