"""Claims on e-mails after a crash or a restart of Postgres, on a server that the test starts."""

import asyncio
import os
import signal
from contextlib import suppress
from uuid import uuid4

import asyncpg
import pytest

from deploy.local.machine.folders import Place
from deploy.local.servers.postgres_process import postgres_process
from service.postgres import schema
from service.postgres.pool import Connection
from tests.harness.examples import CONVEYANCER
from tests.harness.waiting import eventually
from tests.worker.conftest import store
from worker.mail import ledger


@pytest.fixture
def server(tmp_path):
    """A Postgres server that keeps its data over restarts."""
    with postgres_process(Place(folder=tmp_path, keep=True, report=print)) as started:
        yield started


async def prepare(url: str) -> None:
    """Store one e-mail with an expired claim, and make Postgres look as if it had been up for a day."""
    connection = await asyncpg.connect(url)
    await schema.apply(connection)
    await connection.execute("INSERT INTO conveyancer VALUES ($1, 'Acme', false)", CONVEYANCER)
    request = await store(connection)
    await connection.execute(
        """
        INSERT INTO email (email_key, request_id, claimed_by, next_attempt_at)
        VALUES ('an-event', $1, gen_random_uuid(), now() - interval '1 second')
        """,
        request.id,
    )
    await connection.execute("UPDATE postgres_up SET since = now() - interval '1 day'")
    await connection.close()


async def reconnect(url: str) -> Connection:
    """Connect as soon as Postgres accepts connections again."""

    async def connected() -> "Connection | None":
        with suppress(OSError, asyncpg.PostgresError):
            return await asyncpg.connect(url)
        return None

    connection: Connection = await eventually(connected)
    return connection


async def claims(connection: Connection, *, seconds: float) -> int:
    """Claim what is due, for *seconds*. Returns the number of e-mails claimed."""
    return len(await ledger.claim(connection, uuid4(), under_way=[], limit=10, seconds=seconds))


async def uptime(connection: Connection) -> float:
    """Return how long the postmaster has been running, in seconds."""
    age: float = await connection.fetchval(
        "SELECT extract(epoch FROM now() - pg_postmaster_start_time())::float"
    )
    return age


async def test_expired_claims_are_left_alone_for_as_long_again_after_crash_recovery(server):
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


async def test_expired_claims_are_left_alone_for_as_long_again_after_a_restart(server):
    await prepare(server.url)
    assert server.process is not None
    await asyncio.to_thread(server.process.stop)
    server.process.restart()

    connection = await reconnect(server.url)

    assert await connection.fetchval("SELECT count(*) FROM postgres_up") == 1
    assert await claims(connection, seconds=60.0) == 0
    await connection.close()
