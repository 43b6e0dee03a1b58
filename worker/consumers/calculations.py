"""calculation.created → calculation_id, and request.calculated."""

import msgspec

from service.calculation_requests import storing as calculation_requests
from service.calculation_requests.storing import RequestNotFound
from service.identifiers import parse_uuid
from service.outbox.events import CalculationCreated, CloudEvent
from service.outbox.waker import RelayWaker
from service.postgres import pool as postgres
from service.postgres import schema
from service.postgres.pool import Pool
from service.telemetry import tracing
from service.telemetry.logs import traceparent
from worker.consumers.consumer import Consumer, Malformed
from worker.rabbitmq.topology import CALCULATION_RESULTS
from worker.settings import WorkerSettings


class CalculationAlreadyRecorded(Exception):
    """The request has another calculation."""


class Result(msgspec.Struct, frozen=True):
    """A calculation as its team announced it, and the trace it belongs to."""

    calculation: CalculationCreated
    traceparent: str | None


def consumer(settings: WorkerSettings, pool: Pool, relay: RelayWaker) -> Consumer[Result]:
    """Return the consumer of the calculation teams' results, which wakes the relay."""
    seconds = settings.work_timeout_seconds

    async def handle(result: Result) -> None:
        await record_calculation(result, pool=pool, seconds=seconds)
        relay.wake()

    return Consumer(
        settings,
        CALCULATION_RESULTS,
        decode=decode,
        handle=handle,
        refusals=(RequestNotFound, CalculationAlreadyRecorded),
        dependency=schema.readiness(pool, seconds=seconds),
    )


def decode(body: bytes) -> Result:
    """Read a CloudEvent in structured JSON, or its data alone. Raises Malformed."""
    try:
        return _plain(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Malformed from None


def _plain(body: bytes) -> Result:
    outer = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if "specversion" not in outer:
        return Result(msgspec.json.decode(body, type=CalculationCreated), None)
    event = msgspec.json.decode(body, type=CloudEvent[CalculationCreated])
    if event.type != CalculationCreated.type:
        raise Malformed
    return Result(event.data, traceparent({"traceparent": event.traceparent or ""}))


async def record_calculation(result: Result, *, pool: Pool, seconds: float) -> None:
    """Set the calculation of a request once, and announce it in the same transaction."""
    request_id = parse_uuid(result.calculation.request_uuid)
    if request_id is None:
        raise RequestNotFound
    calculation_id = result.calculation.calculation_id
    async with postgres.transaction(pool, seconds=seconds) as connection:
        request = await calculation_requests.lock(connection, request_id)
        if request.calculation_id == calculation_id:
            return  # A redelivery: the event went out with the first.
        if request.calculation_id is not None:
            raise CalculationAlreadyRecorded
        await calculation_requests.record_calculation(
            connection, request, calculation_id, traceparent=tracing.onward(result.traceparent)
        )
