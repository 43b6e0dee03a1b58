"""Stores new requests, each with its event in one statement. For a repeat, reading.py finds the request."""

import asyncio
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from service.calculation_requests import reading
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.model import CalculationRequest, Idempotency, IdempotencyKeyInFlight
from service.calculation_requests.request_secrets import SecretKeyRing
from service.identifiers import new_request_id
from service.outbox import events
from service.outbox.waking import RelayWaker
from service.postgres import connections
from service.postgres.group_commit import GroupCommit
from service.postgres.pool import Pool
from service.settings import KEY_WAIT_SHARE
from service.telemetry import tracing

_FIRST_PAUSE_SECONDS = 0.005  # before checking again whether a key is free: about as long as a commit takes
_NOT_STORED = datetime(1970, 1, 1, tzinfo=UTC)  # the time of a request until Postgres sets it


def new_request(sent: Mapping[str, Any], *, conveyancer_id: str, keys: SecretKeyRing) -> CalculationRequest:
    """Return the row of a new request, made from the columns that the caller sent."""
    return CalculationRequest(
        id=new_request_id(),
        conveyancer_id=conveyancer_id,
        created_at=_NOT_STORED,
        updated_at=_NOT_STORED,
        calculation_id=None,
        secret_salt=secrets.token_bytes(16),
        secret_key_id=keys.current_id,
        sequence=1,
        **sent,
    )


class Storage:
    """Stores new requests, each with its request.created. Concurrent creates share a transaction."""

    def __init__(self, pool: Pool, relay: RelayWaker, *, seconds: float) -> None:
        self._pool = pool
        self._relay = relay
        self._seconds = seconds
        self._group_commit = GroupCommit(pool, INSERT, seconds=seconds)

    async def store(
        self,
        request: CalculationRequest,
        idempotency: Idempotency | None,
        traceparent: str | None,
        until: float,
    ) -> tuple[CalculationRequest, bool]:
        """Store a request before the deadline *until*. Returns it, and whether an earlier create stored it.

        A create that stores nothing looks for the request with its key. If there is none, another create is
        storing the key, and may fail. So this create tries again after a pause.

        After PostgresUnavailable the request may have been stored. After UnknownConveyancer, AlreadyErased,
        IdempotencyKeyReused or IdempotencyKeyInFlight it has not been stored.
        """
        firm = request.conveyancer_id
        waits_until = time.monotonic() + self._seconds * KEY_WAIT_SHARE
        pause = _FIRST_PAUSE_SECONDS
        arguments = insert_arguments(request, idempotency, traceparent)
        while True:
            with tracing.span("INSERT calculation_request", "client", lambda: _SPAN):
                row = await self._group_commit.execute(request.id, arguments, until=until, party=firm)
            if row is not None:
                request.created_at = request.updated_at = row[1]
                self._relay.wake()
                return request, False
            if idempotency is None:
                raise UnknownConveyancer
            seconds = until - time.monotonic()
            async with connections.acquired(self._pool, seconds=seconds, party=firm) as connection:
                earlier = await reading.find_by_idempotency_key(connection, idempotency, conveyancer_id=firm)
            if earlier is not None:
                return earlier, True
            if (left := waits_until - time.monotonic()) <= 0:
                raise IdempotencyKeyInFlight
            await asyncio.sleep(min(pause, left))
            pause *= 2


_SPAN = {
    "db.system.name": "postgresql",
    "db.operation.name": "INSERT",
    "db.collection.name": "calculation_request",
}


def insert_arguments(
    request: CalculationRequest, idempotency: Idempotency | None, traceparent: str | None
) -> tuple[Any, ...]:
    """Return the arguments of INSERT."""
    created = request.event(events.RequestCreated, sequence=request.sequence)
    return (
        request.conveyancer_id,  # $1
        *(idempotency or (None, None)),  # $2, $3
        traceparent,  # $4
        msgspec.json.encode(created).decode(),  # $5
        *(getattr(request, name) for name in _COLUMNS),  # $6 and so on
    )


# Stores a request and its request.created event, and returns its id and time, if all these conditions hold.
# Otherwise stores neither. All but the first apply only if there is an idempotency key, "the key" here.
#
# - The conveyancer is active. With a foreign key, all inserts of a firm would share a lock on its row.
# - No request is stored with the key. The lock of the fourth condition would not exclude an earlier create of
#   the same group commit, because a session can acquire its own lock again.
# - No request with the key was erased.
# - No other session is storing a request with the key. The key is locked until the transaction ends.
# - No create with the key was committed after this statement began. ON CONFLICT checks this.
#
# The statement never waits for another create, because waiting would delay the whole group, and groups with
# the same keys could deadlock. ON CONFLICT alone would wait for a create that is storing the key.
# The time is Postgres's, because machines' clocks differ.
_COLUMNS = [name for name in CalculationRequest.__struct_fields__ if name not in {"created_at", "updated_at"}]
_COLUMN_VALUES = ", ".join(f"${6 + index}" for index in range(len(_COLUMNS)))
INSERT = f"""
    WITH inserted AS (
        INSERT INTO calculation_request ({", ".join(_COLUMNS)}, idempotency_key, idempotency_sha256)
        SELECT {_COLUMN_VALUES}, $2, $3
          FROM active_conveyancer
         WHERE active_conveyancer.id = $1
           AND ($2::text IS NULL
                OR (NOT EXISTS (SELECT
                                  FROM calculation_request
                                 WHERE conveyancer_id = $1
                                   AND idempotency_key = $2)
                    AND NOT EXISTS (SELECT
                                      FROM erased_request
                                     WHERE conveyancer_id = $1
                                       AND key_sha256 = sha256(convert_to($2, 'UTF8')))
                    AND pg_try_advisory_xact_lock(hashtextextended($2, hashtextextended($1, 0)))))
        ON CONFLICT (conveyancer_id, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
        RETURNING id, sequence, conveyancer_id, created_at
    ), kept AS (
        INSERT INTO event (request_id, sequence, type, conveyancer_id, time, data, transaction)
        SELECT id, sequence, '{events.RequestCreated.type}', conveyancer_id, created_at, $5,
               pg_current_xact_id()
          FROM inserted
    )
    INSERT INTO outbox (request_id, sequence, traceparent)
    SELECT id, sequence, $4
      FROM inserted
    RETURNING request_id, (SELECT created_at FROM inserted)
"""  # noqa: S608 - constants only
