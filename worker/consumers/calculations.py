"""Consumes calculation.created: sets calculation_id and announces request.calculated."""

from collections.abc import Sequence
from uuid import UUID

import msgspec

from service.calculation_requests import changing, reading
from service.calculation_requests.changing import Announcement
from service.calculation_requests.model import EventSource, RequestErased, RequestNotFound
from service.identifiers import parse_uuid
from service.outbox import events
from service.outbox.events import CalculationCreated, CloudEvent
from service.outbox.lanes import RelayWaker
from service.postgres import connections
from service.postgres.pool import Connection, Pool
from worker.batches import Failure, Failures, RowLocked
from worker.consumers.consumer import NO_UUID, Consumer
from worker.consumers.incoming import Incoming, Malformed
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
    seconds = settings.work_timeout_seconds

    async def handle(results: Sequence[Result]) -> Failures:
        async with connections.transaction(pool, seconds=seconds) as connection:
            failures = await record_results(connection, results)
        relay.wake()
        return failures

    return Consumer(
        settings,
        CALCULATION_RESULTS,
        pool,
        decode=decode,
        handle=handle,
        # A result for an erased request is dead-lettered, because its team may have to erase the result.
        refusals=(RequestNotFound, RequestErased, CalculationAlreadyRecorded),
    )


def decode(message: Incoming, traceparent: str | None) -> Result:
    """Read a CloudEvent in structured JSON, or its data alone. Raises Malformed."""
    path = "data." if message.is_event else ""
    if message.is_event:
        event = message.to(CloudEvent[CalculationCreated])
        if event.type != CalculationCreated.type:
            raise Malformed(f"Expected {CalculationCreated.type}", field="type")
        created = event.data
    else:
        created = message.to(CalculationCreated)
    request_id = parse_uuid(created.request_uuid)
    if request_id is None:
        raise Malformed(NO_UUID, field=f"{path}request_uuid")
    return Result(request_id, created.calculation_id, traceparent, path)


async def record_results(connection: Connection, results: Sequence[Result]) -> Failures:
    """Record each result once, however often it is delivered, in the caller's transaction.

    The failures are RequestNotFound, RequestErased, CalculationAlreadyRecorded and RowLocked. If a batch has
    several results for a request, the first counts.
    """
    ids = {result.request_id for result in results}
    free = await changing.lock(connection, ids, waits=False)
    absent = ids - free.keys()
    if absent:
        absent -= await reading.find_existing(connection, absent)
    # Erased requests are read last, so a request erased meanwhile counts as locked or erased, not as unknown.
    gone = await reading.find_erased(connection, absent) if absent else set()
    failures: list[Failure] = []
    new: dict[UUID, Result] = {}
    for result in results:
        request = free.get(result.request_id)
        failure: Failure = None
        if result.request_id in gone:
            failure = RequestErased(f"{result.path}request_uuid: the request was erased")
        elif result.request_id in absent:
            failure = RequestNotFound(f"{result.path}request_uuid: there is no such request")
        elif request is None:
            failure = RowLocked()
        else:
            recorded = request.calculation_id or new.setdefault(request.id, result).calculation_id
            if recorded != result.calculation_id:
                failure = CalculationAlreadyRecorded(
                    f"{result.path}calculation_id: the request has another calculation"
                )
        failures.append(failure)  # None even for a redelivery: the first delivery wrote the event.
    if new:
        await _set_calculations(connection, [(free[each.request_id], each) for each in new.values()])
    return failures


async def _set_calculations(connection: Connection, results: Sequence[tuple[EventSource, Result]]) -> None:
    """Set the calculations of locked requests, and announce them. Announcing updates each row's sequence."""
    await reading.begin_change(connection)
    calculated_at = await connection.fetchval(
        f"""
        UPDATE calculation_request
           SET calculation_id = new.calculation_id,
               calculation_sequence = sequence + 1,
               calculated_at = {reading.CHANGED_AT},
               updated_at = {reading.CHANGED_AT}
          FROM unnest($1::uuid[], $2::text[]) AS new (id, calculation_id)
         WHERE calculation_request.id = new.id
        RETURNING calculated_at
        """,  # noqa: S608 - constants only
        [request.id for request, _ in results],
        [result.calculation_id for _, result in results],
    )
    announcements = []
    for request, result in results:
        event = events.RequestCalculated(
            **request.event_payload(sequence=request.sequence + 1), calculation_id=result.calculation_id
        )
        announcements.append(Announcement(request.id, event, calculated_at, result.traceparent))
    await changing.announce(connection, announcements)
