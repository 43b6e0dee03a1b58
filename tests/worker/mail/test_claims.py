"""Claims on e-mails after a crash or a restart of Postgres, on a server that the test starts."""

import asyncio
import os
import signal
from contextlib import suppress
from functools import partial
from uuid import uuid4

import asyncpg
import pytest

from deploy.local.machine.folders import Place
from deploy.local.servers.postgres_process import postgres_process
from service.postgres import schema
from tests.harness.examples import CONVEYANCER
from tests.harness.waiting import eventually
from tests.worker.conftest import store
from worker.mail import ledger

UP_FOR_A_DAY = "UPDATE postgres_up SET since = now() - interval '1 day'"


@pytest.fixture
def server(tmp_path):
    """A Postgres server that keeps its data over restarts."""
    with postgres_process(Place(folder=tmp_path, keep=True, report=print)) as started:
        yield started


@pytest.fixture
async def with_expired_claim(server):
    """The server, with an e-mail whose claim has expired."""
    connection = await asyncpg.connect(server.url)
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
    await connection.execute(UP_FOR_A_DAY)
    await connection.close()
    return server


async def connected(url):
    with suppress(OSError, asyncpg.PostgresError):
        return await asyncpg.connect(url)
    return None


async def claims(connection, *, seconds):
    """Claim what is due, for *seconds*. Returns the number of e-mails claimed."""
    return len(await ledger.claim(connection, uuid4(), under_way=[], limit=10, seconds=seconds))


async def test_expired_claims_are_left_alone_for_as_long_again_after_crash_recovery_and_after_a_restart(
    with_expired_claim,
):
    url, process = with_expired_claim.url, with_expired_claim.process
    victim, witness = await asyncpg.connect(url), await asyncpg.connect(url)
    os.kill(victim.get_server_pid(), signal.SIGKILL)
    await eventually(witness.is_closed)

    connection = await eventually(partial(connected, url))
    half = "SELECT extract(epoch FROM now() - pg_postmaster_start_time())::float / 2"
    assert await claims(connection, seconds=await connection.fetchval(half)) == 0
    await eventually(lambda: claims(connection, seconds=0.1))
    await connection.execute(UP_FOR_A_DAY)
    await connection.close()

    await asyncio.to_thread(process.stop)
    process.restart()
    connection = await eventually(partial(connected, url))
    assert await connection.fetchval("SELECT count(*) FROM postgres_up") == 1
    assert await claims(connection, seconds=60.0) == 0
    await connection.close()
