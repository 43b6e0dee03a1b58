"""Consumes calculation.created: sets calculation_id and announces request.calculated."""

import msgspec

from service import json_faults
from service.calculation_requests import reading
from service.calculation_requests.model import CalculationRequest, RequestNotFound
from service.calculation_requests.storing import announce, now
from service.identifiers import parse_uuid
from service.outbox import events
from service.outbox.events import CalculationCreated, CloudEvent
from service.outbox.waker import RelayWaker
from service.postgres import loans, schema
from service.postgres.pool import Connection, Pool
from worker.consumers.consumer import NO_UUID, Consumer, Malformed
from worker.rabbitmq.topology import CALCULATION_RESULTS
from worker.settings import WorkerSettings


class CalculationAlreadyRecorded(Exception):
    """The request has another calculation."""


def consumer(settings: WorkerSettings, pool: Pool, relay: RelayWaker) -> Consumer[CalculationCreated]:
    """Return the consumer of the calculation teams' results, which wakes the relay."""
    seconds = settings.work_timeout_seconds

    async def handle(result: CalculationCreated, traceparent: str) -> None:
        await record_result(result, pool=pool, seconds=seconds, traceparent=traceparent)
        relay.wake()

    return Consumer(
        settings,
        CALCULATION_RESULTS,
        decode=decode,
        handle=handle,
        refusals=(RequestNotFound, CalculationAlreadyRecorded),
        dependency=schema.readiness(pool, seconds=seconds),
    )


def decode(body: bytes) -> CalculationCreated:
    """Read a CloudEvent in structured JSON, or its data alone. Raises Malformed."""
    try:
        return _parse(body)
    except json_faults.UNREADABLE as error:
        raise Malformed.because(error, body) from None


def _parse(body: bytes) -> CalculationCreated:
    outer = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if "specversion" not in outer:
        return msgspec.json.decode(body, type=CalculationCreated)
    event = msgspec.json.decode(body, type=CloudEvent[CalculationCreated])
    if event.type != CalculationCreated.type:
        raise Malformed(f"Expected {CalculationCreated.type}", field="type")
    return event.data


async def record_result(
    result: CalculationCreated, *, pool: Pool, seconds: float, traceparent: str | None = None
) -> None:
    """Record a result once, however often it is delivered, in a transaction of at most *seconds*.

    Raises Malformed, RequestNotFound, and CalculationAlreadyRecorded when the request has a different
    calculation.
    """
    request_id = parse_uuid(result.request_uuid)
    if request_id is None:
        raise Malformed(NO_UUID, field="request_uuid")
    async with loans.transaction(pool, seconds=seconds) as connection:
        try:
            request = await reading.lock(connection, request_id)
        except RequestNotFound:
            raise RequestNotFound("request_uuid: there is no such request") from None
        if request.calculation_id == result.calculation_id:
            return  # A redelivery: the event was written with the first delivery.
        if request.calculation_id is not None:
            raise CalculationAlreadyRecorded("calculation_id: the request has another calculation")
        await set_calculation(connection, request, result.calculation_id, traceparent=traceparent)


async def set_calculation(
    connection: Connection, request: CalculationRequest, calculation_id: str, *, traceparent: str | None
) -> None:
    """Set the calculation of a locked request and announce it, in the caller's transaction."""
    calculated_at = now()
    event = events.RequestCalculated(
        **request.event_payload(sequence=request.sequence + 1), calculation_id=calculation_id
    )
    await connection.execute(
        """
        UPDATE calculation_request
           SET calculation_id = $2,
               calculation_sequence = $3,
               calculated_at = $4,
               updated_at = $4
         WHERE id = $1
        """,
        request.id,
        calculation_id,
        event.sequence,
        calculated_at,
    )
    await announce(connection, request, event, time=calculated_at, traceparent=traceparent)
