"""A failover of Postgres loses nothing that was answered, acknowledged or recorded."""

import asyncio
import time
from contextlib import suppress

import pytest
from msgspec.structs import replace

from service.calculation_requests.model import CalculationRequest, Idempotency
from service.calculation_requests.storing import Storage
from service.every_firm import erasing
from service.every_firm.announcing import EmailEnd
from service.outbox.lanes import RelayWaker
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool, open_pool
from tests.harness.standby import replicated
from tests.harness.stored import insert, new_request
from tests.harness.waiting import eventually
from worker.consumers.calculations import Result, record_results
from worker.mail import ledger
from worker.mail.ledger import EmailToSend

_SECONDS = 0.5


@pytest.fixture
async def servers():
    """A primary with a standby, both private."""
    async with replicated() as started:
        yield started


async def create(pool: Pool, request: CalculationRequest) -> None:
    storage = Storage(pool, RelayWaker(pool, seconds=_SECONDS), seconds=_SECONDS)
    await storage.store(request, Idempotency("key", b"body"), None, time.monotonic() + _SECONDS)


async def record_email(pool: Pool, request: CalculationRequest) -> None:
    async with connections.Acquired(pool, seconds=_SECONDS) as connection:
        await ledger.add(connection, [EmailToSend("to send", request.id)])


async def record_end(pool: Pool, request: CalculationRequest) -> None:
    async with connections.transaction(pool, seconds=_SECONDS) as connection:
        sent = EmailEnd("sent", request.id, "250 OK", None, 0, None)
        assert await ledger.record_ends(connection, [sent]) == [None]


async def record_result(pool: Pool, request: CalculationRequest) -> None:
    async with connections.transaction(pool, seconds=_SECONDS) as connection:
        assert await record_results(connection, [Result(request.id, "calculation")]) == [None]


async def erase(pool: Pool, request: CalculationRequest) -> None:
    async with (
        connections.Acquired(pool, seconds=_SECONDS) as connection,
        connections.bounded_transaction(connection),
    ):
        await erasing.erase(connection, [request.id])


_WORKS = (create, record_email, record_end, record_result, erase)
_ALL_ARE_DONE = """
    SELECT EXISTS (SELECT FROM calculation_request WHERE id = $1)
       AND EXISTS (SELECT FROM email WHERE request_id = $2)
       AND EXISTS (SELECT FROM email WHERE request_id = $3 AND state = 'sent')
       AND EXISTS (SELECT FROM calculation_request WHERE id = $4 AND calculation_id IS NOT NULL)
       AND NOT EXISTS (SELECT FROM calculation_request WHERE id = $5)
"""


async def test_work_is_done_only_once_a_standby_has_it_and_is_there_after_a_failover(
    servers, service_settings
):
    """Even if an earlier attempt has committed it, without the standby."""
    requests = [new_request() for _ in _WORKS]

    async def attempt(pool: Pool) -> list[str]:
        works = (work(pool, request) for work, request in zip(_WORKS, requests, strict=True))
        return [repr(outcome) for outcome in await asyncio.gather(*works, return_exceptions=True)]

    async def are_done(pool: Pool) -> bool:
        with suppress(PostgresUnavailable):
            async with connections.Acquired(pool, seconds=_SECONDS) as connection:
                return bool(await connection.fetchval(_ALL_ARE_DONE, *(each.id for each in requests)))
        return False

    async with open_pool(replace(service_settings, database_url=servers.url)) as pool:
        async with connections.Acquired(pool, seconds=10) as connection:
            for request in requests[1:]:
                await insert(connection, request)
            await ledger.add(connection, [EmailToSend("sent", requests[2].id)])
        await servers.cut_off()
        attempts = []
        for _ in range(2):
            attempts.append(await attempt(pool))
            await servers.end_waits()
        await servers.admit()
        attempts.append(await attempt(pool))
        await servers.fail_over()
        await eventually(lambda: are_done(pool))

    unavailable, done = ["PostgresUnavailable()"] * len(_WORKS), ["None"] * len(_WORKS)
    assert attempts == [unavailable, unavailable, done]
