"""request.created → an e-mail to the customer: the intent is written first, then sent from the ledger."""

import asyncio

import msgspec

from service.calculation_requests.model import RequestNotFound
from service.identifiers import parse_uuid
from service.outbox import events
from service.outbox.events import CloudEvent, RequestCreated
from service.postgres import loans, schema
from service.postgres.pool import Pool
from service.telemetry import trace_context, tracing
from worker.consumers.consumer import Consumer, Malformed
from worker.mail import ledger
from worker.rabbitmq.topology import NOTIFICATIONS
from worker.settings import WorkerSettings


def consumer(
    settings: WorkerSettings, pool: Pool, due: asyncio.Event
) -> Consumer[CloudEvent[RequestCreated]]:
    """Return the consumer that writes down which e-mails to send, and sets *due*."""
    seconds = settings.work_timeout_seconds

    async def handle(event: CloudEvent[RequestCreated]) -> None:
        incoming = trace_context.traceparent({"traceparent": event.traceparent or ""})
        traceparent = tracing.onward(incoming)
        await intend_email(event.data, pool=pool, seconds=seconds, traceparent=traceparent)
        due.set()

    return Consumer(
        settings,
        NOTIFICATIONS,
        decode=decode,
        handle=handle,
        refusals=(RequestNotFound,),
        dependency=schema.readiness(pool, seconds=seconds),
    )


def decode(body: bytes) -> CloudEvent[RequestCreated]:
    """Read a request.created event. Raises Malformed."""
    try:
        event = msgspec.json.decode(body, type=CloudEvent[RequestCreated])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Malformed from None
    # The ledger knows an e-mail by its event: another sequence would be another e-mail to the same customer.
    if event.type != RequestCreated.type or event.data.sequence != 1:
        raise Malformed
    return event


async def intend_email(
    event: RequestCreated, *, pool: Pool, seconds: float, traceparent: str | None = None
) -> None:
    """Write the intent to send one e-mail for one event, however often the event comes."""
    request_id = parse_uuid(event.uuid)
    if request_id is None:
        raise RequestNotFound
    event_id = events.event_id(event.uuid, event.type, event.sequence)
    async with loans.connection(pool, seconds=seconds) as connection:
        if not await ledger.intend(connection, event_id, request_id, traceparent=traceparent):
            raise RequestNotFound
