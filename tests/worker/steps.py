"""The steps of a stored request, its e-mail and its calculation, as its consumer handles a batch."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from aio_pika import Message
from aio_pika.abc import AbstractChannel, AbstractQueue

from service.calculation_requests import email_changes
from service.calculation_requests.changing import change_all
from service.calculation_requests.email_changes import EmailId, FirstEmail
from service.calculation_requests.model import CalculationRequest
from service.outbox import asyncapi
from service.outbox.events import CalculationCreated, RequestCreated
from service.postgres import connections
from service.postgres.pool import Connection, Pool
from tests.harness.in_process import running
from tests.harness.stored import QUEUED
from tests.harness.waiting import eventually
from tests.worker.conftest import bind_tap, store
from worker import reconciliation
from worker.batches import Failures
from worker.consumers import calculations, incoming, notifications
from worker.mail.postman import Postman
from worker.rabbitmq import topology


async def store_many(database: Connection, number: int) -> list[CalculationRequest]:
    """Store requests whose request.created have been published."""
    async with database.transaction():
        requests = [await store(database) for _ in range(number)]
    await database.execute("DELETE FROM outbox")
    return requests


async def bind_full_queue(channel: AbstractChannel, routing_key: str) -> AbstractQueue:
    """Bind a full queue: the broker refuses events with this key, and other queues still get them."""
    full = await bind_tap(channel, routing_key, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    await channel.default_exchange.publish(Message(b""), full.name)
    return full


async def bury(channel: AbstractChannel, queue: topology.Queue, body: bytes, **properties: Any) -> None:
    exchange = await channel.get_exchange(topology.DEAD_LETTERS)
    await exchange.publish(Message(body, **properties), queue.dead_letters, mandatory=True)


async def intend(database: Connection, request: CalculationRequest, *, emails: int = 1) -> None:
    """Add the first e-mail of a request, or several that are pending at once."""
    await email_changes.add_first(database, [FirstEmail(request.id)])
    further = "SELECT $1, generate_series(2, $2), 'invitation'"
    await database.execute(f"INSERT INTO email (request_id, number, kind) {further}", request.id, emails)


async def intend_email(event: RequestCreated, *, pool: Pool) -> None:
    """Record that an e-mail is to be sent. Raises as its failure says."""
    body = msgspec.json.encode(asyncapi.example_of(event))
    intent = notifications.decode(incoming.read(body), None)
    async with connections.acquired(pool, seconds=5.0) as connection:
        failures = await notifications.record_emails(connection, [intent])
    _check(failures)


async def calculate(connection: Connection, uuid: str, calculation_id: str = "C-1") -> None:
    """Record a calculation of a request that is not locked. Raises as its failure says."""
    body = msgspec.json.encode(CalculationCreated(uuid, calculation_id))
    decoded = calculations.decode(incoming.read(body), None)
    async with connection.transaction():
        failures = await calculations.record_results(connection, [decoded])
    _check(failures)


def _check(failures: Failures) -> None:
    (error,) = failures
    if error is not None:
        raise error


async def add_email(connection: Connection, request: CalculationRequest, number: int) -> list[EmailId]:
    """Add an e-mail to a request, unless one is pending or the number is taken."""
    async with change_all(connection, [request.id]) as requests:
        email = EmailId(request.id, number, "invitation")
        return await email_changes.add(connection, [email], requests)


async def attempt_emails(database: Connection, postman: Postman) -> None:
    """Attempt to send every pending e-mail once."""
    attempted = "SELECT bool_and(attempts > 0 OR state <> 'pending') FROM email"
    async with running(postman.run):
        await eventually(lambda: database.fetchval(attempted))


async def finish(database: Connection, postman: Postman, request: CalculationRequest) -> None:
    """Send the e-mail of a request, and record a calculation."""
    await intend(database, request)
    await attempt_emails(database, postman)
    await calculate(database, request.uuid)


def id_of(request: CalculationRequest) -> str:
    """Return the id of the request's first event."""
    return f"{request.uuid}.request.created.1"


def key_of(request: CalculationRequest, number: int = 1) -> str:
    """Return the key of an e-mail of a request, of which there may be several."""
    return f"{request.uuid}.invitation.{number}"


async def states(database: Connection) -> dict[str, str]:
    rows = await database.fetch("SELECT request_id, number, kind, state FROM email ORDER BY number")
    return {EmailId(*row[:3]).key: row["state"] for row in rows}


async def assert_sound(database: Connection, *, found: Sequence[str] = ()) -> None:
    """Check that requests, events and e-mails add up, but for the discrepancies in *found*."""
    async with database.transaction(isolation="repeatable_read", readonly=True):
        discrepancies = await reconciliation.find_discrepancies(database, datetime(1971, 1, 1, tzinfo=UTC))
    assert [each["discrepancy"] for each in discrepancies if each["requests"]] == [*found]


async def record_emails(database: Connection, number: int, **fields: Any) -> list[CalculationRequest]:
    """Store requests, each with a pending e-mail."""
    requests = [await store(database, **fields) for _ in range(number)]
    for request in requests:
        await intend(database, request)
    return requests


async def all_are(database: Connection, state: str) -> bool:
    return await database.fetch("SELECT DISTINCT state FROM email") == [(state,)]


async def announced(database: Connection) -> list[tuple[str, dict[str, Any]]]:
    """Return the type and the data of the events about e-mails in the outbox."""
    rows = await database.fetch(QUEUED)
    return [(row["type"], json.loads(row["data"])) for row in rows if row["type"].startswith("request.email")]
