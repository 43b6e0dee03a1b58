"""Consumes request.created: records in the ledger that the customer is to get an e-mail."""

import asyncio
from collections.abc import Sequence

from service.calculation_requests import reading
from service.calculation_requests.model import RequestNotFound
from service.identifiers import parse_uuid
from service.outbox import events
from service.outbox.events import CloudEvent, RequestCreated
from service.postgres import connections
from service.postgres.pool import Connection, Pool
from worker.batches import Failures
from worker.consumers.consumer import NO_UUID, Consumer, commits
from worker.consumers.incoming import Incoming, Malformed
from worker.mail import ledger
from worker.mail.ledger import EmailToSend
from worker.rabbitmq.topology import NOTIFICATIONS
from worker.settings import WorkerSettings


def consumer(settings: WorkerSettings, pool: Pool, due: asyncio.Event) -> Consumer[EmailToSend]:
    """Return the consumer that records which e-mails to send, and then sets *due* for the postman."""
    seconds = settings.work_timeout_seconds

    async def handle(intents: Sequence[EmailToSend]) -> Failures:
        async with connections.Acquired(pool, seconds=seconds) as connection:
            failures = await record_emails(connection, intents)
        due.set()
        return failures

    return Consumer(
        settings,
        NOTIFICATIONS,
        decode=decode,
        handle=handle,
        refusals=(RequestNotFound,),
        dependency=commits(pool, seconds=seconds),
    )


def decode(message: Incoming, traceparent: str | None) -> EmailToSend:
    """Read a request.created event. Raises Malformed.

    The traceparent is stored: another process may send the e-mail, hours later, and continue the trace.
    """
    event = message.to(CloudEvent[RequestCreated])
    if event.type != RequestCreated.type:
        raise Malformed(f"Expected {RequestCreated.type}", field="type")
    # The ledger identifies an e-mail by its event id, which contains the sequence: any other sequence would
    # send the customer a second e-mail.
    if event.data.sequence != 1:
        raise Malformed("Expected 1", field="data.sequence")
    request_id = parse_uuid(event.data.uuid)
    if request_id is None:
        raise Malformed(NO_UUID, field="data.uuid")
    event_id = events.event_id(event.data.uuid, event.type, event.data.sequence)
    return EmailToSend(event_id, request_id, traceparent)


async def record_emails(connection: Connection, intents: Sequence[EmailToSend]) -> Failures:
    """Record that one e-mail is to be sent for each event, however often it is delivered.

    For an erased request there is nothing to do. The failure is RequestNotFound when there was no request.
    """
    known = await ledger.add(connection, intents)
    if missing := {intent.request_id for intent in intents} - known:
        known |= await reading.find_erased(connection, missing)
    return [
        None if intent.request_id in known else RequestNotFound("data.uuid: there is no such request")
        for intent in intents
    ]
