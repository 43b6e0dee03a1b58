"""One message, handled as its consumer handles a batch."""

from datetime import UTC, datetime

import msgspec

from service.outbox import events
from service.outbox.events import CalculationCreated, RequestCreated
from service.postgres import connections
from service.postgres.pool import Connection, Pool
from worker.batches import Failures
from worker.consumers import calculations, incoming, notifications


async def intend_email(event: RequestCreated, *, pool: Pool) -> None:
    """Record that an e-mail is to be sent. Raises as its failure says."""
    body = events.encode(event, time=datetime.now(UTC), traceparent=None)
    intent = notifications.decode(incoming.read(body), None)
    async with connections.acquired(pool, seconds=5.0) as connection:
        failures = await notifications.record_emails(connection, [intent])
    _check(failures)


async def calculate(connection: Connection, uuid: str, calculation_id: str = "C-1") -> None:
    """Record a calculation of a request that is not locked. Raises as its failure says."""
    body = msgspec.json.encode(CalculationCreated(uuid, calculation_id))
    decoded = calculations.decode(incoming.read(body), None)
    async with connection.transaction():
        _check(await calculations.record_results(connection, [decoded]))


def _check(failures: Failures) -> None:
    (error,) = failures
    if error is not None:
        raise error
