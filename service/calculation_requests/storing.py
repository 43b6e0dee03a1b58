"""The statements that write calculation requests, each with the event that announces the change."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol
from uuid import UUID

import asyncpg
import msgspec

from service.calculation_requests import fee_waiver, request_secrets
from service.calculation_requests.columns import with_columns
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.fee_waiver import RequestedWaiver
from service.calculation_requests.idempotency import Idempotency, IdempotencyKeyInFlight
from service.calculation_requests.model import CalculationRequest, NewCalculationRequest
from service.calculation_requests.reading import find_by_idempotency_key
from service.calculation_requests.request_secrets import SecretKeyRing
from service.identifiers import new_request_id
from service.outbox import events, lanes
from service.postgres import loans
from service.postgres.group_commit import GroupCommit
from service.postgres.pool import Connection, Pool
from service.telemetry import tracing


def now() -> datetime:
    """Return the time in whole seconds: the interface shows no fraction, so none is stored."""
    return datetime.fromtimestamp(int(time.time()), UTC)


class Validation(Protocol):
    """Makes the request to be stored, once it is known whether its waiver applies."""

    def __call__(self, *, waiver_applies: bool) -> NewCalculationRequest:
        """Return the request. Raises an error of the caller's if it is not valid."""


class Storage:
    """Stores new requests, each with its request.created: in a group where it can, alone where it must."""

    def __init__(self, pool: Pool, keys: SecretKeyRing, *, timeout_seconds: float) -> None:
        self._pool = pool
        self._keys = keys
        self._timeout_seconds = timeout_seconds
        self._group_commit = GroupCommit(pool, _INSERT, seconds=timeout_seconds)

    async def store(
        self,
        validate: Validation,
        *,
        waiver: RequestedWaiver | None,
        idempotency: Idempotency | None,
        conveyancer_id: str,
        traceparent: str | None,
        on_uuid: Callable[[str], None],
    ) -> tuple[CalculationRequest, bool]:
        """Store the request that *validate* builds. Returns it, and whether it is a repeat, as `insert` does.

        Calls *on_uuid* as `insert` does.

        With an idempotency key a create may have to wait for another one; with a waiver it reads the
        conveyancer's fee setting first. Both are stored alone: in a group they would delay the others. Raises
        what *validate* and `insert` raise, and PostgresUnavailable.
        """
        if waiver is None and idempotency is None:
            request = _new(validate(waiver_applies=False), conveyancer_id=conveyancer_id, keys=self._keys)
            on_uuid(request.uuid)
            await self._insert_in_group(request, traceparent)
            return request, False
        async with loans.connection(self._pool, seconds=self._timeout_seconds) as connection:
            waiver_applies = waiver is not None and await fee_waiver.applies(
                connection, waiver, conveyancer_id=conveyancer_id, idempotency=idempotency
            )
            return await insert(
                connection,
                validate(waiver_applies=waiver_applies),
                conveyancer_id=conveyancer_id,
                keys=self._keys,
                traceparent=traceparent,
                idempotency=idempotency,
                on_uuid=on_uuid,
            )

    async def _insert_in_group(self, request: CalculationRequest, traceparent: str | None) -> None:
        with tracing.span("INSERT calculation_request", "client", lambda: _SPAN):
            stored = await self._group_commit.execute(_arguments(request, traceparent, None))
        if request.id not in stored:
            raise UnknownConveyancer


async def insert(
    connection: Connection,
    new: NewCalculationRequest,
    *,
    conveyancer_id: str,
    keys: SecretKeyRing,
    traceparent: str | None,
    idempotency: Idempotency | None = None,
    on_uuid: Callable[[str], None] = lambda _: None,
) -> tuple[CalculationRequest, bool]:
    """Store a request and its request.created event in one statement.

    Returns it, and whether it is a repeat: then it is the request stored with this key, as it is now.
    Calls *on_uuid* with the new uuid first, because after an outage the request may have been stored.
    Raises UnknownConveyancer, IdempotencyKeyReused and IdempotencyKeyInFlight, and stores nothing.
    """
    request = _new(new, conveyancer_id=conveyancer_id, keys=keys)
    on_uuid(request.uuid)
    try:
        with tracing.span("INSERT calculation_request", "client", lambda: _SPAN):
            stored = await connection.fetchval(_INSERT, *_arguments(request, traceparent, idempotency))
    except asyncpg.LockNotAvailableError:
        if idempotency is None:
            raise
        raise IdempotencyKeyInFlight from None
    if stored is not None:
        return request, False
    if idempotency is None:
        raise UnknownConveyancer
    return await find_by_idempotency_key(connection, idempotency, conveyancer_id=conveyancer_id), True


_SPAN = {
    "db.system.name": "postgresql",
    "db.operation.name": "INSERT",
    "db.collection.name": "calculation_request",
}

# Stores a request and its request.created event, so both or neither exist, and returns the id. Stores nothing
# when the conveyancer is unknown or has used the idempotency key before. Waits for another create that uses
# the key, until the lock_timeout of this transaction: one of the session would not work behind a transaction
# pooler. Selects from conveyancer: the lock of a foreign key would be shared by all inserts of a firm.
_INSERT = with_columns(
    """
    WITH stored AS (
        INSERT INTO calculation_request ({columns}, idempotency_key, idempotency_sha256)
        SELECT {values}, $2, $3
          FROM conveyancer
         WHERE conveyancer.id = $1
           AND ($4::text IS NULL OR set_config('lock_timeout', $4, true) IS NOT NULL)
        ON CONFLICT (conveyancer_id, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
        RETURNING id, sequence
    )
    INSERT INTO outbox (lane, request_id, type, sequence, traceparent, payload)
    SELECT $5, stored.id, $6, stored.sequence, $7, $8
      FROM stored
    RETURNING request_id
    """,
    values_after=8,
)


def _arguments(
    request: CalculationRequest, traceparent: str | None, idempotency: Idempotency | None
) -> tuple[Any, ...]:
    """Return the arguments of _INSERT."""
    created = events.RequestCreated(**request.event_payload(sequence=request.sequence))
    return (
        request.conveyancer_id,
        idempotency and idempotency.key,
        idempotency and idempotency.sha256,
        idempotency and idempotency.lock_timeout,
        lanes.lane_of(request.id),
        created.type,
        traceparent,
        events.encode(created, time=request.created_at, traceparent=traceparent),
        *msgspec.structs.astuple(request),
    )


def _new(new: NewCalculationRequest, *, conveyancer_id: str, keys: SecretKeyRing) -> CalculationRequest:
    created_at = now()
    return CalculationRequest(
        id=new_request_id(),
        conveyancer_id=conveyancer_id,
        created_at=created_at,
        updated_at=created_at,
        calculation_id=None,
        secret_salt=request_secrets.new_salt(),
        secret_key_id=keys.current_id,
        sequence=1,
        **msgspec.structs.asdict(new),
    )


class Announcement(msgspec.Struct, frozen=True):
    """The next event of a locked request, and when it happened."""

    request_id: UUID
    event: events.RequestEvent
    time: datetime
    traceparent: str | None = None


async def announce(connection: Connection, announcements: Sequence[Announcement]) -> None:
    """Write events of locked requests to the outbox, and record the last sequence of each request."""
    await connection.execute(
        """
        WITH announced AS (
            SELECT *
              FROM unnest($1::smallint[], $2::uuid[], $3::text[], $4::integer[], $5::text[], $6::bytea[])
                   AS event (lane, request_id, type, sequence, traceparent, payload)
        ), counted AS (
            UPDATE calculation_request
               SET sequence = last.sequence
              FROM (SELECT request_id, max(sequence) AS sequence
                      FROM announced
                     GROUP BY request_id) AS last
             WHERE id = last.request_id
        )
        INSERT INTO outbox (lane, request_id, type, sequence, traceparent, payload)
        SELECT lane, request_id, type, sequence, traceparent, payload
          FROM announced
         ORDER BY sequence
        """,
        *zip(*map(_outbox_row, announcements), strict=True),
    )


def _outbox_row(announcement: Announcement) -> tuple[Any, ...]:
    request_id, event, time, traceparent = msgspec.structs.astuple(announcement)
    payload = events.encode(event, time=time, traceparent=traceparent)
    return lanes.lane_of(request_id), request_id, event.type, event.sequence, traceparent, payload
