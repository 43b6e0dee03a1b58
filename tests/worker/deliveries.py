"""One message, handled as its consumer handles a batch."""

import msgspec

from service.calculation_requests.model import now
from service.outbox import events
from service.outbox.events import CalculationCreated, RequestCreated
from service.postgres import connections
from service.postgres.pool import Connection, Pool
from tests.harness.waiting import eventually
from worker.batches import Failures, RowLocked
from worker.consumers import calculations, incoming, notifications


async def intend_email(event: RequestCreated, *, pool: Pool) -> None:
    """Record that an e-mail is to be sent. Raises as its failure says."""
    body = events.encode(event, time=now(), traceparent=None)
    intent = notifications.decode(incoming.read(body), None)
    async with connections.Acquired(pool, seconds=5.0) as connection:
        failures = await notifications.record_emails(connection, [intent])
    _check(failures)


async def record_result(result: CalculationCreated, *, pool: Pool) -> None:
    """Record a calculation, once its request is not locked. Raises as its failure says."""

    async def failures_if_free() -> Failures | None:
        async with connections.transaction(pool, seconds=10.0) as connection:
            failures = await _record(connection, result)
        return None if isinstance(failures[0], RowLocked) else failures

    _check(await eventually(failures_if_free))


async def calculate(connection: Connection, uuid: str, calculation_id: str) -> None:
    async with connection.transaction():
        _check(await _record(connection, CalculationCreated(uuid, calculation_id)))


async def _record(connection: Connection, result: CalculationCreated) -> Failures:
    decoded = calculations.decode(incoming.read(msgspec.json.encode(result)), None)
    return await calculations.record_results(connection, [decoded])


def _check(failures: Failures) -> None:
    (error,) = failures
    if error is not None:
        raise error
