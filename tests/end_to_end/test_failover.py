"""A failover of Postgres loses nothing that was answered, acknowledged or recorded."""

import asyncio
import time

import asyncpg
import msgspec
import pytest

from service.calculation_requests.model import Idempotency
from service.calculation_requests.storing import Storage
from service.operations import erasing
from service.outbox.lanes import RelayWaker
from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import open_pool
from tests.harness.standby import replicated
from tests.harness.stored import insert, new_request
from worker.consumers.calculations import Result, record_results
from worker.mail import ledger
from worker.mail.ledger import Intent

_SECONDS = 0.5


@pytest.fixture
async def servers():
    """A primary with a standby, both private."""
    async with replicated() as started:
        yield started


async def test_work_is_done_only_once_a_standby_has_it_even_if_an_earlier_attempt_committed_it(
    *, servers, service_settings
):
    new, stored, erased = new_request(), new_request(), new_request()

    async def create(pool):
        storage = Storage(pool, RelayWaker(pool, seconds=_SECONDS), seconds=_SECONDS)
        until = time.monotonic() + _SECONDS
        await storage.store(new, Idempotency("key", b"body"), None, until)

    async def record_email(pool):
        async with loans.Loan(pool, seconds=_SECONDS) as connection:
            await ledger.add(connection, [Intent("event", stored.id)])

    async def record_result(pool):
        async with loans.transaction(pool, seconds=_SECONDS) as connection:
            assert await record_results(connection, [Result(stored.id, "calculation")]) == [None]

    async def erase(_):
        connection = await asyncpg.connect(servers.primary_url, command_timeout=_SECONDS)
        try:
            async with loans.bounded_transaction(connection):
                await erasing.erase(connection, [erased.id])
        except TimeoutError as error:
            raise PostgresUnavailable from error
        finally:
            connection.terminate()

    settings = msgspec.structs.replace(service_settings, database_url=servers.primary_url)
    async with open_pool(settings) as pool:
        async with loans.Loan(pool, seconds=10) as connection:
            await insert(connection, stored)
            await insert(connection, erased)
        works = [create, record_email, record_result, erase]
        await servers.cut_off()
        attempts = []
        for _ in range(2):
            attempts.append(await asyncio.gather(*(work(pool) for work in works), return_exceptions=True))
            await servers.end_waits()
        await servers.admit()
        for work in works:
            await work(pool)

    for attempt in attempts:
        assert {work.__name__: repr(outcome) for work, outcome in zip(works, attempt, strict=True)} == {
            work.__name__: "PostgresUnavailable()" for work in works
        }
