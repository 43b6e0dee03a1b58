"""A failover of Postgres loses nothing that was answered, acknowledged or recorded."""

import asyncio
import time

import asyncpg
import pytest
from msgspec.structs import replace

from service.calculation_requests.model import Idempotency
from service.calculation_requests.storing import Storage
from service.every_firm import erasing
from service.identifiers import uuid_of
from service.outbox.lanes import RelayWaker
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import open_pool
from tests.end_to_end.callers import another_request, create_many
from tests.end_to_end.events import publish_calculation
from tests.harness.in_process import api_client, worker_probes
from tests.harness.standby import replicated
from tests.harness.stored import insert, new_request
from tests.harness.tcp_proxy import TcpProxy
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


async def test_work_is_done_only_once_a_standby_has_it_even_if_an_earlier_attempt_committed_it(
    *, servers, service_settings
):
    new, stored, erased = new_request(), new_request(), new_request()

    async def create(pool) -> None:
        storage = Storage(pool, RelayWaker(pool, seconds=_SECONDS), seconds=_SECONDS)
        until = time.monotonic() + _SECONDS
        await storage.store(new, Idempotency("key", b"body"), None, until)

    async def record_email(pool) -> None:
        async with connections.Acquired(pool, seconds=_SECONDS) as connection:
            await ledger.add(connection, [EmailToSend("event", stored.id)])

    async def record_result(pool) -> None:
        async with connections.transaction(pool, seconds=_SECONDS) as connection:
            assert await record_results(connection, [Result(stored.id, "calculation")]) == [None]

    async def erase(_) -> None:
        connection = await asyncpg.connect(servers.primary_url, command_timeout=_SECONDS)
        try:
            async with connections.bounded_transaction(connection):
                await erasing.erase(connection, [erased.id])
        except TimeoutError as error:
            raise PostgresUnavailable from error
        finally:
            connection.terminate()

    settings = replace(service_settings, database_url=servers.primary_url)
    async with open_pool(settings) as pool:
        async with connections.Acquired(pool, seconds=10) as connection:
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

    mail_server.data_delay_seconds = 5.0  # longer than it takes to cut the standby off
    api = replace(service_settings, database_url=servers.url, database_timeout_seconds=2.0)
    worker = replace(worker_settings, database_url=servers.url, database_timeout_seconds=0.5)
    primary = await asyncpg.connect(servers.primary_url)
    async with (
        api_client(api, issuer.token()) as client,
        TcpProxy(worker.amqp_url) as network,
        worker_probes(worker, "relay"),
        worker_probes(replace(worker, amqp_url=network.url), "notifications", "calculations"),
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
        mail_server.data_delay_seconds = 0.0
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
