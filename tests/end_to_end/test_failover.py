"""A failover of Postgres loses nothing that was answered, acknowledged or recorded."""

import asyncio
import time
from contextlib import suppress

import asyncpg
import httpx
import pytest
from msgspec.structs import replace

from service.calculation_requests import erasing
from service.calculation_requests.email_changes import EmailEnd, EmailId
from service.calculation_requests.model import CalculationRequest, Idempotency
from service.calculation_requests.storing import Storage
from service.command_line import connecting
from service.identifiers import uuid_of
from service.outbox.waking import RelayWaker
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool, open_pool
from tests.end_to_end.callers import another_request, create_many
from tests.end_to_end.events import publish_calculation
from tests.harness import databases
from tests.harness.in_process import api_client, worker_probes
from tests.harness.standby import replicated
from tests.harness.stored import insert, new_request
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from worker.consumers.calculations import Result, record_results
from worker.mail import ledger
from worker.mail.ledger import EmailToSend

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
        await ledger.add(connection, [EmailToSend(request.id)])


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
            await ledger.add(connection, [EmailToSend(requests[2].id)])
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


@pytest.mark.long
async def test_failover_loses_nothing_that_was_answered_acknowledged_or_accepted(
    *, servers, service_settings, worker_settings, issuer, channel, mail_server
):
    bodies = [another_request() for _ in range(8)]
    answered: set[str] = set()

    async def send_all() -> bool:
        """Send every body at the same time, each with its key. Returns whether all were answered with 200."""
        answers = await asyncio.gather(
            *(
                client.post("/v1/request", json=body, headers={"Idempotency-Key": body["external_id"]})
                for body in bodies
            )
        )
        assert {answer.status_code for answer in answers} <= {200, 503}
        answered.update(answer.json()["data"]["uuid"] for answer in answers if answer.is_success)
        return all(answer.is_success for answer in answers)

    urls = [databases.as_role(servers.url, role) for role in ("api", "worker")]
    api = replace(service_settings, database_url=urls[0], database_timeout_seconds=2.0)
    worker = replace(worker_settings, database_url=urls[1], database_timeout_seconds=0.5)
    primary = await asyncpg.connect(servers.primary_url)
    mails = TcpProxy(worker.smtp_url)
    mails.hold_before(b"Message-ID:")  # No e-mail is accepted until the standby is cut off.
    async with (
        mails,
        api_client(api, issuer.token()) as client,
        TcpProxy(worker.amqp_url) as network,
        worker_probes(worker, "relay"),
        worker_probes(
            replace(worker, amqp_url=network.url, smtp_url=mails.url), "notifications", "calculations"
        ),
    ):
        mailed = await create_many(client, 8)
        await eventually(
            lambda: primary.fetchval("SELECT count(*) = 8 FROM email WHERE claimed_by IS NOT NULL")
        )
        network.hold()
        announced = await create_many(client, 8)
        for record in mailed:
            await publish_calculation(channel, record["uuid"], "calculation")
        await eventually(lambda: primary.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))
        await create_many(client, 1)  # A commit that waits: the standby has all before it.
        accepted_before = len(mail_server.accepted)
        await servers.cut_off()
        network.resume()
        mails.resume()
        await eventually(lambda: len(mail_server.accepted) == 8)
        for _ in range(5):  # Each takes two seconds, in which its commit waits.
            await send_all()
        accepted_meanwhile = len(mail_server.accepted)
        await primary.close()
        await servers.fail_over()
        await eventually(send_all)
        database = await asyncpg.connect(servers.standby_url)
        await eventually(lambda: database.fetchval(_IS_FINISHED, 17 + 8, 8))

    answered |= {record["uuid"] for record in (*mailed, *announced)}
    rows = await database.fetch("SELECT id FROM calculation_request")
    await database.close()
    assert answered <= {uuid_of(row["id"]) for row in rows}
    assert (accepted_before, accepted_meanwhile) == (0, 8)
    assert len(mail_server.accepted) == 17 + 8


_IS_FINISHED = """
    SELECT (SELECT count(*) FROM email WHERE state = 'sent') = $1
       AND (SELECT count(*) FROM calculation_request WHERE calculation_id IS NOT NULL) = $2
"""


async def test_feed_is_not_read_from_a_standby_and_begins_anew_after_a_failover(
    servers, service_settings, issuer
):
    of_standby = replace(service_settings, database_url=servers.standby_url)
    of_primary = replace(service_settings, database_url=servers.primary_url)
    async with (
        api_client(of_standby, issuer.token()) as client,
        api_client(of_primary, issuer.token()) as first,
    ):
        await create_many(first, 1)
        page = (await first.get("/v1/event")).json()["data"]
        newest, early = await client.get("/v1/request"), await client.get("/v1/event")
        await servers.fail_over()

        async def read_on() -> httpx.Response | None:
            response = await client.get("/v1/event", params={"after": page["after"]})
            return None if response.status_code == 503 else response

        refused = await eventually(read_on)
        again = (await client.get("/v1/event")).json()["data"]

    assert (newest.status_code, early.status_code) == (200, 503)
    assert (refused.status_code, refused.json()["errors"][0]["code"]) == (410, "cursor_outdated")
    assert again["events"] == page["events"] != []
