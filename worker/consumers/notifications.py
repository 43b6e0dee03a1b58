"""Consumes request.created: records the customer's e-mail in the ledger."""

import asyncio
from collections.abc import Sequence

from service.calculation_requests import email_changes, reading
from service.calculation_requests.email_changes import FirstEmail
from service.calculation_requests.model import RequestNotFound
from service.outbox.events import CloudEvent, RequestCreated
from service.postgres.pool import Connection, Pool
from worker.batches import Failures
from worker.consumers.consumer import Consumer
from worker.consumers.incoming import Incoming, Malformed, request_id_in
from worker.rabbitmq.topology import NOTIFICATIONS
from worker.settings import WorkerSettings


def consumer(settings: WorkerSettings, pool: Pool, wake: asyncio.Event) -> Consumer[FirstEmail]:
    """Return the consumer that records which e-mails to send. It then wakes the `Postman` by *wake*."""
    return Consumer(
        settings,
        NOTIFICATIONS,
        pool,
        decode=decode,
        record=record_emails,
        committed=wake.set,
        refusals=(RequestNotFound,),
    )


def decode(message: Incoming, traceparent: str | None) -> FirstEmail:
    """Read a request.created event. Its e-mail, perhaps hours later, gets the trace. Raises Malformed."""
    event = message.to(CloudEvent[RequestCreated])
    if event.type != RequestCreated.type:
        raise Malformed(f"type: Expected {RequestCreated.type}")
    return FirstEmail(request_id_in(event.data.uuid, "data.uuid"), traceparent)


async def record_emails(connection: Connection, intents: Sequence[FirstEmail]) -> Failures:
    """Record one e-mail to send for each event, however often the event is delivered.

    An erased request gets no e-mail. If the request has never existed, the failure is RequestNotFound.
    """
    known = await email_changes.add_first(connection, intents)
    if missing := {intent.request_id for intent in intents} - known:
        known |= await reading.find_erased(connection, missing)
    return [
        None if intent.request_id in known else RequestNotFound("data.uuid: there is no such request")
        for intent in intents
    ]
