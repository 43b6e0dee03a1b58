"""Consumes calculation.created: sets calculation_id and announces request.calculated."""

from collections.abc import Container, Sequence
from uuid import UUID

import msgspec

from service import json_faults
from service.calculation_requests import erased, reading
from service.calculation_requests.model import AnnouncedRequest, RequestErased, RequestNotFound
from service.calculation_requests.storing import Announcement, announce, now
from service.identifiers import parse_uuid
from service.outbox import events
from service.outbox.events import CalculationCreated, CloudEvent
from service.outbox.waker import RelayWaker
from service.postgres import loans, schema
from service.postgres.pool import Connection, Pool
from worker.batches import Outcomes, RowLocked
from worker.consumers.consumer import NO_UUID, Consumer, Delivered, Malformed
from worker.rabbitmq.topology import CALCULATION_RESULTS
from worker.settings import WorkerSettings


class CalculationAlreadyRecorded(Exception):
    """The request has another calculation."""


class Result(msgspec.Struct, frozen=True):
    """A calculation, and the request that it is for."""

    request_id: UUID
    calculation_id: str


def consumer(settings: WorkerSettings, pool: Pool, relay: RelayWaker) -> Consumer[Result]:
    """Return the consumer of the calculation teams' results, which wakes the relay."""
    seconds = settings.work_timeout_seconds

    async def handle(results: Sequence[Delivered[Result]]) -> Outcomes:
        async with loans.transaction(pool, seconds=seconds) as connection:
            outcomes = await record_results(connection, results)
        relay.wake()
        return outcomes

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
        created = _parse(body)
    except json_faults.UNREADABLE as error:
        raise Malformed.because(error, body) from None
    request_id = parse_uuid(created.request_uuid)
    if request_id is None:
        raise Malformed(NO_UUID, field="request_uuid")
    return Result(request_id, created.calculation_id)


def _parse(body: bytes) -> CalculationCreated:
    outer = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if "specversion" not in outer:
        return msgspec.json.decode(body, type=CalculationCreated)
    event = msgspec.json.decode(body, type=CloudEvent[CalculationCreated])
    if event.type != CalculationCreated.type:
        raise Malformed(f"Expected {CalculationCreated.type}", field="type")
    return event.data


async def record_results(connection: Connection, results: Sequence[Delivered[Result]]) -> Outcomes:
    """Record each result once, however often it is delivered, in the caller's transaction.

    The outcome is RowLocked, RequestNotFound, RequestErased, or CalculationAlreadyRecorded when the request
    has another calculation.
    """
    ids = [result.content.request_id for result in results]
    requests = await reading.lock_free(connection, set(ids))
    missing = set(ids) - requests.keys()
    locked = await reading.find_existing(connection, missing) if missing else set()
    # Last: a request that is erased meanwhile must count as locked or as erased, not as unknown.
    gone = await erased.among(connection, missing) if missing else set()
    outcomes: list[Exception | None] = []
    new: dict[UUID, Delivered[Result]] = {}
    for request_id, result in zip(ids, results, strict=True):
        request = requests.get(request_id)
        if request is None:
            outcomes.append(_why_missing(request_id, locked=locked, gone=gone))
            continue
        # A redelivery has the id that is recorded; its event was written with the first delivery.
        recorded = request.calculation_id or new.setdefault(request_id, result).content.calculation_id
        is_same = recorded == result.content.calculation_id
        outcomes.append(
            None
            if is_same
            else CalculationAlreadyRecorded("calculation_id: the request has another calculation")
        )
    if new:
        await set_calculations(connection, [(requests[each], result) for each, result in new.items()])
    return outcomes


def _why_missing(request_id: UUID, *, locked: Container[UUID], gone: Container[UUID]) -> Exception:
    """Return the outcome for a request that was not found among those that are not locked."""
    if request_id in locked:
        return RowLocked()
    if request_id in gone:
        return RequestErased("request_uuid: the request was erased")
    return RequestNotFound("request_uuid: there is no such request")


async def set_calculations(
    connection: Connection, results: Sequence[tuple[AnnouncedRequest, Delivered[Result]]]
) -> None:
    """Set the calculations of locked requests and announce them, in the caller's transaction."""
    calculated_at = now()
    announcements = []
    for request, (content, traceparent) in results:
        event = events.RequestCalculated(
            **request.event_payload(sequence=request.sequence + 1), calculation_id=content.calculation_id
        )
        announcements.append(Announcement(request.id, event, calculated_at, traceparent))
    await connection.execute(
        """
        UPDATE calculation_request
           SET calculation_id = new.calculation_id,
               calculation_sequence = new.sequence,
               calculated_at = $4,
               updated_at = $4
          FROM unnest($1::uuid[], $2::text[], $3::integer[]) AS new (id, calculation_id, sequence)
         WHERE calculation_request.id = new.id
        """,
        [each.request_id for each in announcements],
        [result.content.calculation_id for _, result in results],
        [each.event.sequence for each in announcements],
        calculated_at,
    )
    await announce(connection, announcements)
