"""A failover of Postgres loses nothing that was answered, acknowledged or recorded."""

import asyncio
import time
from contextlib import suppress

import pytest
from msgspec.structs import replace

from service.calculation_requests import erasing, event_history
from service.calculation_requests.email_changes import EmailEnd, EmailId, FirstEmail, add_first
from service.calculation_requests.model import CalculationRequest, Idempotency
from service.calculation_requests.storing import Storage
from service.command_line import connecting
from service.outbox.waking import RelayWaker
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool, open_pool
from tests.harness import databases
from tests.harness.examples import CONVEYANCER
from tests.harness.in_process import api_client
from tests.harness.standby import replicated
from tests.harness.stored import insert, new_request
from tests.harness.waiting import eventually
from worker.consumers.calculations import Result, record_results
from worker.mail import ledger

_SECONDS = 0.5  # for what cannot succeed
_PATIENCE_SECONDS = 30.0  # for what must


@pytest.fixture
async def servers():
    async with replicated() as started:
        yield started


async def create(pool: Pool, request: CalculationRequest, seconds: float) -> None:
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
    """Even if an earlier attempt has committed it, without the standby, and another session locks a row."""
    requests = [new_request() for _ in _WORKS]

    async def attempt(pool: Pool, seconds: float) -> list[str]:
        works = (work(pool, request, seconds) for work, request in zip(_WORKS, requests, strict=True))
        return [repr(outcome) for outcome in await asyncio.gather(*works, return_exceptions=True)]

    async def are_done(pool: Pool) -> bool:
        with suppress(PostgresUnavailable):
            async with connections.acquired(pool, seconds=_SECONDS) as connection:
                return bool(await connection.fetchval(_ALL_ARE_DONE, *(each.id for each in requests)))
        return False

    async with open_pool(replace(service_settings, database_url=servers.url)) as pool:
        async with connections.acquired(pool, seconds=10) as connection:
            for request in requests[1:]:
                await insert(connection, request)
            await add_first(connection, [FirstEmail(requests[2].id)])
        await servers.cut_off()
        attempts = []
        for _ in range(2):
            attempts.append(await attempt(pool, _SECONDS))
            await servers.end_waits()
        async with databases.connected(servers.primary_url) as other:
            await other.execute("BEGIN")
            # `record_end` skips this request, and finds that the e-mail has ended.
            await other.execute("SELECT FROM calculation_request WHERE id = $1 FOR UPDATE", requests[2].id)
            attempts.append(await attempt(pool, _SECONDS))
            await servers.end_waits()
        await servers.admit()
        attempts.append(await attempt(pool, _PATIENCE_SECONDS))
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
