"""The statements that write calculation requests, each with the event that announces the change."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from datetime import UTC, datetime
from typing import Any, Protocol
from uuid import UUID

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
from service.outbox.waker import RelayWaker
from service.postgres import loans
from service.postgres.group_commit import GroupCommit
from service.postgres.pool import Connection, Pool
from service.telemetry import tracing

_FIRST_PAUSE_SECONDS = 0.005  # before looking again whether a key is free: about as long as a commit takes


def now() -> datetime:
    """Return the time in whole seconds: the interface shows no fraction, so none is stored."""
    return datetime.fromtimestamp(int(time.time()), UTC)


class Validation(Protocol):
    """Makes the request to be stored, once it is known whether its waiver applies."""

    def __call__(self, *, waiver_applies: bool) -> NewCalculationRequest:
        """Return the request. Raises an error of the caller's if it is not valid."""


class Storage:
    """Stores new requests, each with its request.created, and those that arrive together in a group."""

    def __init__(self, pool: Pool, keys: SecretKeyRing, relay: RelayWaker, *, timeout_seconds: float) -> None:
        self._pool = pool
        self._keys = keys
        self._relay = relay
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
        """Store the request that *validate* builds. Returns it, and whether it is a repeat.

        A repeat is the request that was stored with this key, as it is now; a new one wakes the relay. Calls
        *on_uuid* with the new uuid first, because after an outage the request may have been stored.

        With a waiver, the request is stored alone: the conveyancer's fee setting is read first, on the same
        connection. Raises what *validate* raises, PostgresUnavailable, UnknownConveyancer,
        IdempotencyKeyReused, IdempotencyKeyInFlight and RequestErased; after the last four nothing is stored.
        """
        until = time.monotonic() + self._timeout_seconds

        def create(*, waiver_applies: bool) -> CalculationRequest:
            new = validate(waiver_applies=waiver_applies)
            request = new_request(new, conveyancer_id=conveyancer_id, keys=self._keys)
            on_uuid(request.uuid)
            return request

        if waiver is None:
            request = create(waiver_applies=False)
            is_stored = await self._insert(request, traceparent, idempotency)
        else:
            async with self._connection(until) as connection:
                waiver_applies = await fee_waiver.applies(
                    connection, waiver, conveyancer_id=conveyancer_id, idempotency=idempotency
                )
                request = create(waiver_applies=waiver_applies)
                is_stored = await self._insert(request, traceparent, idempotency, connection)
        if is_stored:
            return request, False
        if idempotency is None:
            raise UnknownConveyancer
        return await self._find_or_insert(request, traceparent, idempotency, until=until)

    async def _insert(
        self,
        request: CalculationRequest,
        traceparent: str | None,
        idempotency: Idempotency | None,
        connection: "Connection | None" = None,
    ) -> bool:
        """Store a request, in a group unless *connection* is given, and wake the relay.

        False, and nothing is stored, in the cases of `insert`.
        """
        with self._relay.lend_notify() as wakes:
            if connection is None:
                is_stored = await self._insert_in_group(request, traceparent, idempotency, wakes=wakes)
            else:
                is_stored = await insert(
                    connection, request, traceparent=traceparent, idempotency=idempotency, wakes=wakes
                )
        if is_stored and not wakes:
            self._relay.wake()
        return is_stored

    async def _insert_in_group(
        self,
        request: CalculationRequest,
        traceparent: str | None,
        idempotency: Idempotency | None,
        *,
        wakes: bool,
    ) -> bool:
        with tracing.span("INSERT calculation_request", "client", lambda: _SPAN):
            stored = await self._group_commit.execute(
                _arguments(request, traceparent, idempotency, wakes=wakes)
            )
        return request.id in stored

    async def _find_or_insert(
        self, request: CalculationRequest, traceparent: str | None, idempotency: Idempotency, *, until: float
    ) -> tuple[CalculationRequest, bool]:
        """Return the request stored with this key, or store *request* once no other create uses the key.

        No connection is held meanwhile: however many wait for one key, they delay no other caller.
        """
        waits_until = time.monotonic() + idempotency.wait_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            async with self._connection(until) as connection:
                with suppress(IdempotencyKeyInFlight):
                    stored = await find_by_idempotency_key(
                        connection, idempotency, conveyancer_id=request.conveyancer_id
                    )
                    return stored, True
                if await self._insert(request, traceparent, idempotency, connection):
                    return request, False
            left = waits_until - time.monotonic()
            if left <= 0:
                raise IdempotencyKeyInFlight
            await asyncio.sleep(min(pause, left))
            pause *= 2

    def _connection(self, until: float) -> AbstractAsyncContextManager[Connection]:
        return loans.connection(self._pool, seconds=until - time.monotonic())


def new_request(
    new: NewCalculationRequest, *, conveyancer_id: str, keys: SecretKeyRing
) -> CalculationRequest:
    """Return the row of a new request."""
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


async def insert(
    connection: Connection,
    request: CalculationRequest,
    *,
    traceparent: str | None,
    idempotency: Idempotency | None = None,
    wakes: bool = False,
) -> bool:
    """Store a request and its request.created event in one statement. With *wakes* it also wakes the relays.

    False, and nothing is stored, when the conveyancer is unknown, or when another create has used or is using
    the idempotency key.
    """
    with tracing.span("INSERT calculation_request", "client", lambda: _SPAN):
        arguments = _arguments(request, traceparent, idempotency, wakes=wakes)
        stored = await connection.fetchval(_INSERT, *arguments)
    return stored is not None


_SPAN = {
    "db.system.name": "postgresql",
    "db.operation.name": "INSERT",
    "db.collection.name": "calculation_request",
}

# Stores a request and its request.created event, so both or neither exist, and returns the id. Stores nothing
# when the conveyancer is unknown or disabled, or another create has used or is using the idempotency key.
#
# It never waits for another create: a group would delay its members, and groups with the same keys could
# deadlock. ON CONFLICT alone would wait for a transaction that has stored the key, or that is updating the
# request stored with it. So a key that is stored is left alone; any other is locked until the transaction
# ends, unless it is locked already. ON CONFLICT is for creates committed after this statement began.
#
# Selects from active_conveyancer: the lock of a foreign key would be shared by all inserts of a firm.
_INSERT = with_columns(
    """
    WITH stored AS (
        INSERT INTO calculation_request ({columns}, idempotency_key, idempotency_sha256)
        SELECT {values}, $2, $3
          FROM active_conveyancer
         WHERE active_conveyancer.id = $1
           AND ($2::text IS NULL
                OR NOT EXISTS (SELECT
                                 FROM calculation_request
                                WHERE conveyancer_id = $1
                                  AND idempotency_key = $2)
                   AND NOT EXISTS (SELECT
                                     FROM erased_request
                                    WHERE conveyancer_id = $1
                                      AND key_sha256 = sha256(convert_to($2, 'UTF8')))
                   AND pg_try_advisory_xact_lock(hashtextextended($2, hashtextextended($1, 0))))
        ON CONFLICT (conveyancer_id, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
        RETURNING id, sequence
    )
    INSERT INTO outbox (lane, request_id, type, sequence, traceparent, payload)
    SELECT $4, stored.id, $5, stored.sequence, $6, $7
      FROM stored
    RETURNING request_id, CASE WHEN $8 THEN pg_notify($9, '')::text END
    """,
    values_after=9,
)


def _arguments(
    request: CalculationRequest, traceparent: str | None, idempotency: Idempotency | None, *, wakes: bool
) -> tuple[Any, ...]:
    """Return the arguments of _INSERT."""
    created = events.RequestCreated(**request.event_payload(sequence=request.sequence))
    return (
        request.conveyancer_id,
        idempotency and idempotency.key,
        idempotency and idempotency.sha256,
        lanes.lane_of(request.id),
        created.type,
        traceparent,
        events.encode(created, time=request.created_at, traceparent=traceparent),
        wakes,
        lanes.CHANNEL,
        *msgspec.structs.astuple(request),
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
