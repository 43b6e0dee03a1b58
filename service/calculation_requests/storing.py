"""The statements that write calculation requests, each with the event that announces the change."""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from service.calculation_requests import conveyancers, reading
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.model import (
    COLUMNS,
    CalculationRequest,
    Idempotency,
    IdempotencyKeyInFlight,
    IdempotencyKeyReused,
)
from service.calculation_requests.request_secrets import SecretKeyRing
from service.identifiers import new_request_id
from service.outbox import events, lanes
from service.outbox.waker import RelayWaker
from service.postgres import loans
from service.postgres.group_commit import GroupCommit
from service.postgres.pool import Connection, Pool
from service.telemetry import tracing

_KEY_WAIT_SHARE = 0.4  # of the time for the database; a create waits so long for another one with its key
_FIRST_PAUSE_SECONDS = 0.005  # before looking again whether a key is free: about as long as a commit takes


def now() -> datetime:
    """Return the time in whole seconds: the interface shows no fraction, so none is stored."""
    return datetime.fromtimestamp(int(time.time()), UTC)


def new_request(sent: Mapping[str, Any], *, conveyancer_id: str, keys: SecretKeyRing) -> CalculationRequest:
    """Return the row of a new request, made from the columns that were sent."""
    created_at = now()
    return CalculationRequest(
        id=new_request_id(),
        conveyancer_id=conveyancer_id,
        created_at=created_at,
        updated_at=created_at,
        calculation_id=None,
        secret_salt=secrets.token_bytes(16),
        secret_key_id=keys.current_id,
        sequence=1,
        **sent,
    )


class Stored(NamedTuple):
    """A request as it is stored, and whether it was before."""

    request: CalculationRequest
    is_repeat: bool


class Storage:
    """Stores new requests, each with its request.created, and those that arrive together in a group."""

    def __init__(self, pool: Pool, relay: RelayWaker, *, timeout_seconds: float) -> None:
        self._pool = pool
        self._relay = relay
        self._timeout_seconds = timeout_seconds
        self._group_commit = GroupCommit(pool, INSERT, seconds=timeout_seconds)

    async def waives_fee(
        self,
        idempotency: Idempotency | None,
        *,
        conveyancer_id: str,
        has_valid_reason: bool,
        until: float,
    ) -> bool:
        """Whether a waiver applies. It is ignored if the conveyancer charges no calculation fee.

        A repeat of a create whose waiver was ignored must succeed even if the conveyancer has begun to
        charge. So an invalid reason is no error if a request with the same key is stored. Raises
        PostgresUnavailable, UnknownConveyancer, and RequestErased if the request with that key was erased.
        """
        async with loans.connection(self._pool, seconds=until - time.monotonic()) as connection:
            if not await conveyancers.charges_calculation_fee(connection, conveyancer_id):
                return False
            if has_valid_reason or idempotency is None:
                return True
            try:
                stored = await reading.find_by_idempotency_key(
                    connection, idempotency, conveyancer_id=conveyancer_id
                )
            except IdempotencyKeyReused:
                return True
            return stored is None

    async def store(
        self,
        request: CalculationRequest,
        idempotency: Idempotency | None,
        traceparent: str | None,
        until: float,
    ) -> Stored:
        """Store a request until a deadline, and wake the relay. A repeat returns what is stored with its key.

        While another create uses the key, this one waits without a connection: it delays no other caller.

        Raises PostgresUnavailable, after which the request may be stored; UnknownConveyancer,
        IdempotencyKeyReused, IdempotencyKeyInFlight and RequestErased, after which it is not.
        """
        waits_until = time.monotonic() + self._timeout_seconds * _KEY_WAIT_SHARE
        pause = _FIRST_PAUSE_SECONDS
        while True:
            with (
                self._relay.lend_notify() as wakes,
                tracing.span("INSERT calculation_request", "client", lambda: _SPAN),
            ):
                arguments = insert_arguments(request, idempotency, traceparent, wakes=wakes)
                is_stored = request.id in await self._group_commit.execute(arguments, until=until)
            if is_stored:
                if not wakes:
                    self._relay.wake()
                return Stored(request, is_repeat=False)
            if idempotency is None:
                raise UnknownConveyancer
            async with loans.connection(self._pool, seconds=until - time.monotonic()) as connection:
                stored = await reading.find_by_idempotency_key(
                    connection, idempotency, conveyancer_id=request.conveyancer_id
                )
            if stored is not None:
                return Stored(stored, is_repeat=True)
            left = waits_until - time.monotonic()
            if left <= 0:
                raise IdempotencyKeyInFlight
            await asyncio.sleep(min(pause, left))
            pause *= 2


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
_VALUES = ", ".join(f"${10 + index}" for index in range(len(CalculationRequest.__struct_fields__)))
INSERT = f"""
    WITH stored AS (
        INSERT INTO calculation_request ({COLUMNS}, idempotency_key, idempotency_sha256)
        SELECT {_VALUES}, $2, $3
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
"""  # noqa: S608 - constants only


def insert_arguments(
    request: CalculationRequest, idempotency: Idempotency | None, traceparent: str | None, *, wakes: bool
) -> tuple[Any, ...]:
    """Return the arguments of INSERT. With *wakes* its commit wakes the relays."""
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
