"""Calculation requests: the record the interface returns, and the SQL of its table."""

import time
from datetime import UTC, datetime
from typing import Any

import asyncpg
import msgspec

from service.calculation_requests import request_secrets
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.idempotency import Idempotency, IdempotencyKeyInFlight
from service.calculation_requests.model import CalculationRequest, Submission
from service.calculation_requests.reading import find_first
from service.calculation_requests.request_secrets import SecretKeyRing
from service.identifiers import new_request_id
from service.outbox import events, writing
from service.postgres.group_commit import GroupCommit
from service.postgres.pool import Connection
from service.telemetry import tracing


def now() -> datetime:
    """Return the time in whole seconds: the interface shows no fraction, so none is stored."""
    return datetime.fromtimestamp(int(time.time()), UTC)


_SPAN = {
    "db.system.name": "postgresql",
    "db.operation.name": "INSERT",
    "db.collection.name": "calculation_request",
}


# Stores a request and its request.created event, so both or neither exist, and returns the id. Stores nothing
# when the conveyancer is unknown or has used the idempotency key before. Who is using the key is waited for,
# until the lock_timeout of this transaction: one of the session would not work behind a transaction pooler.
INSERT = """
    WITH stored AS (
        INSERT INTO calculation_request (
               id, conveyancer_id, created_at, updated_at,
               customer_email, customer_phone, customer_first_name, customer_last_name,
               sender_email, sender_organization_name, sender_first_name, sender_last_name,
               case_ref, request_type, property_value, notes, external_id, meta_data,
               calculation_fee_exempt, calculation_fee_exempt_reason, calculation_id,
               secret_salt, secret_key_id, sequence, idempotency_key, idempotency_sha256)
        SELECT $1, conveyancer.id, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17,
               $18, $19, $20, $21, $22, $23, $24, $29, $30
          FROM conveyancer
         WHERE conveyancer.id = $2
           AND ($31::text IS NULL OR set_config('lock_timeout', $31, true) IS NOT NULL)
        ON CONFLICT (conveyancer_id, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
        RETURNING id
    )
    INSERT INTO outbox (lane, request_id, type, sequence, traceparent, payload)
    SELECT $25, stored.id, $26, $24, $27, $28
      FROM stored
    RETURNING request_id
"""


async def insert(
    connection: Connection,
    submission: Submission,
    *,
    conveyancer_id: str,
    keys: SecretKeyRing,
    traceparent: str | None,
    idempotency: Idempotency | None = None,
) -> tuple[CalculationRequest, bool]:
    """Store a request and its request.created event in one statement.

    Returns it, and whether it was there before: then it is the one that was stored with this idempotency key.
    Raises UnknownConveyancer, IdempotencyKeyReused and IdempotencyKeyInFlight, and stores nothing.
    """
    request = _new(submission, conveyancer_id=conveyancer_id, keys=keys)
    try:
        with tracing.span("INSERT calculation_request", "client", lambda: _SPAN):
            stored = await connection.fetchval(INSERT, *_arguments(request, traceparent, idempotency))
    except asyncpg.LockNotAvailableError:
        if idempotency is None:
            raise
        raise IdempotencyKeyInFlight from None
    if stored is not None:
        return request, False
    if idempotency is None:
        raise UnknownConveyancer
    return await find_first(connection, idempotency, conveyancer_id=conveyancer_id), True


async def insert_in_group(
    group_commit: GroupCommit,
    submission: Submission,
    *,
    conveyancer_id: str,
    keys: SecretKeyRing,
    traceparent: str | None,
) -> CalculationRequest:
    """Store a request as `insert` does, in one transaction with others that come at the same time.

    There is no idempotency key: who has one may have to wait, and would keep the others waiting. Raises
    UnknownConveyancer.
    """
    request = _new(submission, conveyancer_id=conveyancer_id, keys=keys)
    with tracing.span("INSERT calculation_request", "client", lambda: _SPAN):
        stored = await group_commit.execute(_arguments(request, traceparent, None))
    if request.id not in stored:
        raise UnknownConveyancer
    return request


def _new(submission: Submission, *, conveyancer_id: str, keys: SecretKeyRing) -> CalculationRequest:
    created_at = now()
    fields = msgspec.structs.asdict(submission)
    if submission.meta_data is not None:
        fields["meta_data"] = msgspec.json.encode(submission.meta_data).decode()
    return CalculationRequest(
        id=new_request_id(),
        conveyancer_id=conveyancer_id,
        created_at=created_at,
        updated_at=created_at,
        calculation_id=None,
        secret_salt=request_secrets.new_salt(),
        secret_key_id=keys.current_id,
        sequence=1,
        **fields,
    )


def _arguments(
    request: CalculationRequest, traceparent: str | None, idempotency: Idempotency | None
) -> tuple[Any, ...]:
    """Return the arguments of INSERT."""
    created = events.RequestCreated(**request.facts(sequence=request.sequence))
    return (
        *msgspec.structs.astuple(request),
        writing.lane_of(request.id),
        created.type,
        traceparent,
        events.encode(created, time=request.created_at, traceparent=traceparent),
        idempotency and idempotency.key,
        idempotency and idempotency.sha256,
        idempotency and idempotency.lock_timeout,
    )


async def announce(
    connection: Connection,
    request: CalculationRequest,
    event: events.RequestEvent,
    *,
    time: datetime | None = None,
    traceparent: str | None = None,
) -> None:
    """Write the next event of a locked request to the outbox, and count it."""
    await connection.execute(
        """
        WITH counted AS (
            UPDATE calculation_request
               SET sequence = $2
             WHERE id = $1
        )
        INSERT INTO outbox (lane, request_id, type, sequence, traceparent, payload)
        VALUES ($3, $1, $4, $2, $5, $6)
        """,
        request.id,
        event.sequence,
        writing.lane_of(request.id),
        event.type,
        traceparent,
        events.encode(event, time=time or now(), traceparent=traceparent),
    )
