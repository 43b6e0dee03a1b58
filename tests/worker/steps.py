"""The steps of a stored request, its e-mail and its calculation, as its consumer handles a batch."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from aio_pika import Message
from aio_pika.abc import AbstractChannel

from service.calculation_requests import email_changes
from service.calculation_requests.changing import change_all
from service.calculation_requests.email_changes import EmailId, FirstEmail
from service.calculation_requests.model import CalculationRequest
from service.outbox import asyncapi
from service.outbox.events import CalculationCreated, RequestCreated
from service.postgres import connections
from service.postgres.pool import Connection, Pool
from tests.harness.in_process import running
from tests.harness.waiting import eventually
from tests.worker.conftest import store
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


async def bury(channel: AbstractChannel, queue: topology.Queue, body: bytes, **properties: Any) -> None:
    exchange = await channel.get_exchange(topology.DEAD_LETTERS)
    await exchange.publish(Message(body, **properties), queue.dead_letters, mandatory=True)


async def intend(database: Connection, request: CalculationRequest) -> None:
    await email_changes.add_first(database, [FirstEmail(request.id)])


async def intend_several(database: Connection, request: CalculationRequest, count: int) -> None:
    """Add e-mails to a request that are pending at once."""
    added = "SELECT $1, generate_series(1, $2), 'invitation'"
    await database.execute(f"INSERT INTO email (request_id, number, kind) {added}", request.id, count)


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
