"""Consumes calculation.created: sets calculation_id and announces request.calculated."""

from collections.abc import Sequence
from uuid import UUID

import msgspec

from service.calculation_requests import reading
from service.calculation_requests.changing import LockedRequest, change_all
from service.calculation_requests.model import AlreadyErased, RequestNotFound
from service.outbox.events import CalculationCreated, CloudEvent, RequestCalculated
from service.outbox.waking import RelayWaker
from service.postgres.pool import Connection, Pool
from worker.batches import Failure, Failures, TryAgain
from worker.consumers.consumer import Consumer
from worker.consumers.incoming import Incoming, Malformed, request_id_in
from worker.rabbitmq.topology import CALCULATION_RESULTS
from worker.settings import WorkerSettings


class CalculationAlreadyRecorded(Exception):
    """The request already has a different calculation."""


class Result(msgspec.Struct, frozen=True):
    """A calculation and the request that it is for."""

    request_id: UUID
    calculation_id: str
    traceparent: str | None = None
    path: str = ""  # the prefix of field names in refusals: `data.` if the message is a CloudEvent


def consumer(settings: WorkerSettings, pool: Pool, relay: RelayWaker) -> Consumer[Result]:
    """Return the consumer of the calculation teams' results. It wakes the relay."""
    return Consumer(
        settings,
        CALCULATION_RESULTS,
        pool,
        decode=decode,
        record=record_results,
        committed=relay.wake,
        # A result for an erased request is dead-lettered, because its team may have to erase the result.
        refusals=(RequestNotFound, AlreadyErased, CalculationAlreadyRecorded),
    )


def decode(message: Incoming, traceparent: str | None) -> Result:
    """Read a CloudEvent in structured JSON, or its data alone. Raises Malformed."""
    path = "data." if message.is_event else ""
    if message.is_event:
        event = message.to(CloudEvent[CalculationCreated])
        if event.type != CalculationCreated.type:
            raise Malformed(f"type: Expected {CalculationCreated.type}")
        created = event.data
    else:
        created = message.to(CalculationCreated)
    request_id = request_id_in(created.request_uuid, f"{path}request_uuid")
    return Result(request_id, created.calculation_id, traceparent, path)


async def record_results(connection: Connection, results: Sequence[Result]) -> Failures:
    """Record each result once, however often it is delivered. The first of several for a request counts.

    The failures are RequestNotFound, AlreadyErased, CalculationAlreadyRecorded and TryAgain.
    """
    ids = {result.request_id for result in results}
    async with change_all(connection, ids, waits=False) as free:
        others = ids - free.keys()
        locked = await reading.find_existing(connection, others) if others else set()
        others -= locked
        # Read last, so that a request that is erased meanwhile counts as locked or erased, not as unknown.
        erased = await reading.find_erased(connection, others) if others else set()
        return [_record(result, free.get(result.request_id), locked, erased) for result in results]


def _record(result: Result, request: LockedRequest | None, locked: set[UUID], erased: set[UUID]) -> Failure:
    """Set the calculation of the request, if it is free, and announce it. A redelivery changes nothing."""
    if request is None:
        if result.request_id in locked:
            return TryAgain("the row is locked")
        if result.request_id in erased:
            return AlreadyErased(f"{result.path}request_uuid: the request was erased")
        return RequestNotFound(f"{result.path}request_uuid: there is no such request")
    if request.calculation_id is None:
        request.calculation_id = result.calculation_id
        request.announce(
            RequestCalculated, traceparent=result.traceparent, calculation_id=result.calculation_id
        )
    if request.calculation_id == result.calculation_id:
        return None
    request.refused_calculation_id = result.calculation_id  # for `trace`
    return CalculationAlreadyRecorded(f"{result.path}calculation_id: the request has another calculation")
