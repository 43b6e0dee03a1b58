"""Consumes request.created: records in the ledger that the customer is to get an e-mail."""

import asyncio

import msgspec

from service import json_faults
from service.calculation_requests.model import RequestNotFound
from service.identifiers import parse_uuid
from service.outbox import events
from service.outbox.events import CloudEvent, RequestCreated
from service.postgres import loans, schema
from service.postgres.pool import Pool
from worker.consumers.consumer import NO_UUID, Consumer, Malformed
from worker.mail import ledger
from worker.rabbitmq.topology import NOTIFICATIONS
from worker.settings import WorkerSettings


def consumer(
    settings: WorkerSettings, pool: Pool, due: asyncio.Event
) -> Consumer[CloudEvent[RequestCreated]]:
    """Return the consumer that records which e-mails to send, and then sets *due*.

    Sending is left to the postman: retries are scheduled in Postgres, so a mail server that is down for hours
    does not back up the queue. So the length of the queue says little about the e-mails still to be sent.
    """
    seconds = settings.work_timeout_seconds

    async def handle(event: CloudEvent[RequestCreated], traceparent: str) -> None:
        # Stored with the e-mail: another process may send it, hours later, and continue the trace.
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
    except json_faults.UNREADABLE as error:
        raise Malformed.because(error, body) from None
    if event.type != RequestCreated.type:
        raise Malformed(f"Expected {RequestCreated.type}", field="type")
    # The ledger identifies an e-mail by its event id, which contains the sequence: any other sequence would
    # send the customer a second e-mail.
    if event.data.sequence != 1:
        raise Malformed("Expected 1", field="data.sequence")
    return event


async def intend_email(
    event: RequestCreated, *, pool: Pool, seconds: float, traceparent: str | None = None
) -> None:
    """Record that one e-mail is to be sent for an event, however often the event is delivered.

    Raises Malformed and RequestNotFound.
    """
    request_id = parse_uuid(event.uuid)
    if request_id is None:
        raise Malformed(NO_UUID, field="data.uuid")
    event_id = events.event_id(event.uuid, event.type, event.sequence)
    async with loans.connection(pool, seconds=seconds) as connection:
        if not await ledger.add(connection, event_id, request_id, traceparent=traceparent):
            raise RequestNotFound("data.uuid: there is no such request")
