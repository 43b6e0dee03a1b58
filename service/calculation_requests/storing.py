"""Calculation requests: the record the interface returns, and the SQL of its table."""

import time
from datetime import UTC, datetime
from functools import cached_property
from typing import Annotated, Any, Literal
from uuid import UUID

import asyncpg
import msgspec

from service.calculation_requests import request_secrets
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.idempotency import Idempotency, IdempotencyKeyInFlight, IdempotencyKeyReused
from service.calculation_requests.request_secrets import SecretKeyRing
from service.identifiers import new_request_id, uuid_of
from service.outbox import events, writing
from service.postgres.group_commit import GroupCommit
from service.postgres.pool import Connection
from service.telemetry import tracing

RequestType = Literal["SDLT_CALCULATION"]
Uuid = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": "^req_[0-9A-Za-z]{22}$"})]
Url = Annotated[str, msgspec.Meta(extra_json_schema={"format": "uri"})]
Instant = Annotated[datetime, msgspec.Meta(tz=True)]


class RequestNotFound(Exception):
    """There is no such request."""


class ListedCalculationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A calculation request in a list. The secret is null while the service lacks the key that made it."""

    uuid: Uuid
    created_at: Instant
    updated_at: Instant
    customer_email: str
    customer_phone: str | None
    customer_first_name: str
    customer_last_name: str
    sender_email: str
    sender_organization_name: str
    sender_first_name: str
    sender_last_name: str
    case_ref: str
    request_type: RequestType
    property_value: int | None
    notes: str | None
    calculation_id: str | None
    secret: str | None
    request_url: Url | None
    external_id: str | None
    meta_data: dict[str, Any] | None
    calculation_fee_exempt: bool
    calculation_fee_exempt_reason: str | None


class CalculationRequestRecord(ListedCalculationRequest, frozen=True, kw_only=True):
    """A calculation request as create and retrieve return it (interface, *Request, as returned*)."""

    secret: str
    request_url: Url


class CalculationRequest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A row of calculation_request."""

    id: UUID
    conveyancer_id: str
    created_at: datetime
    updated_at: datetime
    customer_email: str
    customer_phone: str | None
    customer_first_name: str
    customer_last_name: str
    sender_email: str
    sender_organization_name: str
    sender_first_name: str
    sender_last_name: str
    case_ref: str
    request_type: RequestType
    property_value: int | None
    notes: str | None
    external_id: str | None
    meta_data: str | None
    calculation_fee_exempt: bool
    calculation_fee_exempt_reason: str | None
    calculation_id: str | None
    secret_salt: bytes
    secret_key_id: str
    sequence: int

    @cached_property
    def uuid(self) -> str:
        """The identifier as the outside sees it."""
        return uuid_of(self.id)

    def request_url(self, keys: SecretKeyRing, app_url: str) -> str:
        """Return the customer's link, secret included: never to be logged or queued.

        Raises SecretKeyMissing.
        """
        return request_secrets.request_url(app_url, self.uuid, self.secret(keys))

    def secret(self, keys: SecretKeyRing) -> str:
        """Return the secret that opens this request. Raises SecretKeyMissing."""
        return keys.secret(self.id, salt=self.secret_salt, key_id=self.secret_key_id)

    def record(self, keys: SecretKeyRing, app_url: str) -> CalculationRequestRecord:
        """Return what the interface shows of this request. Raises SecretKeyMissing."""
        secret = self.secret(keys)
        url = request_secrets.request_url(app_url, self.uuid, secret)
        return CalculationRequestRecord(secret=secret, request_url=url, **self._shown())

    def record_without_secret(self) -> ListedCalculationRequest:
        """Return what can be shown of this request while the key of its secret is missing."""
        return ListedCalculationRequest(secret=None, request_url=None, **self._shown())

    def _shown(self) -> dict[str, Any]:
        return {
            "uuid": self.uuid,
            "created_at": self.created_at,
            "updated_at": self.updated_at,
            "customer_email": self.customer_email,
            "customer_phone": self.customer_phone,
            "customer_first_name": self.customer_first_name,
            "customer_last_name": self.customer_last_name,
            "sender_email": self.sender_email,
            "sender_organization_name": self.sender_organization_name,
            "sender_first_name": self.sender_first_name,
            "sender_last_name": self.sender_last_name,
            "case_ref": self.case_ref,
            "request_type": self.request_type,
            "property_value": self.property_value,
            "notes": self.notes,
            "calculation_id": self.calculation_id,
            "external_id": self.external_id,
            "meta_data": None if self.meta_data is None else msgspec.json.decode(self.meta_data),
            "calculation_fee_exempt": self.calculation_fee_exempt,
            "calculation_fee_exempt_reason": self.calculation_fee_exempt_reason,
        }

    def facts(self, *, sequence: int) -> dict[str, Any]:
        """Return the fields that every event about this request carries."""
        return {
            "uuid": self.uuid,
            "tenant": self.conveyancer_id,
            "request_type": self.request_type,
            "property_value": self.property_value,
            "calculation_fee_exempt": self.calculation_fee_exempt,
            "external_id": self.external_id,
            "sequence": sequence,
        }


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request as submitted, after the rules of the fee waiver."""

    customer_email: str
    customer_phone: str | None
    customer_first_name: str
    customer_last_name: str
    sender_email: str
    sender_organization_name: str
    sender_first_name: str
    sender_last_name: str
    case_ref: str
    request_type: RequestType
    property_value: int | None
    notes: str | None
    external_id: str | None
    meta_data: dict[str, Any] | None
    calculation_fee_exempt: bool
    calculation_fee_exempt_reason: str | None


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


async def find_first(
    connection: Connection, idempotency: Idempotency, *, conveyancer_id: str
) -> CalculationRequest:
    """Return the request that was stored with this key.

    Raises IdempotencyKeyReused when it came with another body, IdempotencyKeyInFlight when there is none,
    and UnknownConveyancer.
    """
    row = await connection.fetchrow(
        """
        SELECT request.id, request.idempotency_sha256
          FROM conveyancer
          LEFT JOIN calculation_request AS request
            ON request.conveyancer_id = conveyancer.id
           AND request.idempotency_key = $1
         WHERE conveyancer.id = $2
        """,
        idempotency.key,
        conveyancer_id,
    )
    if row is None:
        raise UnknownConveyancer
    if row["id"] is None:
        raise IdempotencyKeyInFlight
    if row["idempotency_sha256"] != idempotency.sha256:
        raise IdempotencyKeyReused
    return await find(connection, row["id"], conveyancer_id=conveyancer_id)


async def find(connection: Connection, request_id: UUID, *, conveyancer_id: str) -> CalculationRequest:
    """Return a request of this conveyancer.

    Raises RequestNotFound, also when it is another's, and UnknownConveyancer.
    """
    row = await connection.fetchrow(
        """
        SELECT request.id, request.conveyancer_id, request.created_at, request.updated_at,
               request.customer_email, request.customer_phone, request.customer_first_name,
               request.customer_last_name,
               request.sender_email, request.sender_organization_name, request.sender_first_name,
               request.sender_last_name,
               request.case_ref, request.request_type, request.property_value, request.notes,
               request.external_id, request.meta_data,
               request.calculation_fee_exempt, request.calculation_fee_exempt_reason,
               request.calculation_id,
               request.secret_salt, request.secret_key_id, request.sequence
          FROM conveyancer
          LEFT JOIN calculation_request AS request
            ON request.id = $1
           AND request.conveyancer_id = conveyancer.id
         WHERE conveyancer.id = $2
        """,
        request_id,
        conveyancer_id,
    )
    if row is None:
        raise UnknownConveyancer
    if row["id"] is None:
        raise RequestNotFound
    return CalculationRequest(**row)


async def list_newest(
    connection: Connection, *, conveyancer_id: str, external_id: str | None, before: UUID, limit: int
) -> list[CalculationRequest]:
    """Return this conveyancer's newest requests older than *before*: those with *external_id*, if given.

    At most 101 of them. The two statements compare and order by all columns of their index. With
    `conveyancer_id = $1` the planner would drop that column from the order, and might read the primary key
    backwards, past the rows of everybody else. The constant limit tells a generic plan that a page is small.
    """
    if external_id is None:
        return await _list_newest(connection, conveyancer_id, before, limit)
    return await _list_newest_by_external_id(connection, conveyancer_id, external_id, before, limit)


async def _list_newest(
    connection: Connection, conveyancer_id: str, before: UUID, limit: int
) -> list[CalculationRequest]:
    rows = await connection.fetch(
        """
        SELECT *
          FROM (SELECT id, conveyancer_id, created_at, updated_at,
                       customer_email, customer_phone, customer_first_name, customer_last_name,
                       sender_email, sender_organization_name, sender_first_name, sender_last_name,
                       case_ref, request_type, property_value, notes, external_id, meta_data,
                       calculation_fee_exempt, calculation_fee_exempt_reason, calculation_id,
                       secret_salt, secret_key_id, sequence
                  FROM calculation_request
                 WHERE conveyancer_id >= $1
                   AND (conveyancer_id, id) < ($1, $2)
                 ORDER BY conveyancer_id DESC, id DESC
                 LIMIT 101) AS newest
         ORDER BY conveyancer_id DESC, id DESC
         LIMIT $3
        """,
        conveyancer_id,
        before,
        limit,
    )
    return [CalculationRequest(**row) for row in rows]


async def _list_newest_by_external_id(
    connection: Connection, conveyancer_id: str, external_id: str, before: UUID, limit: int
) -> list[CalculationRequest]:
    rows = await connection.fetch(
        """
        SELECT *
          FROM (SELECT id, conveyancer_id, created_at, updated_at,
                       customer_email, customer_phone, customer_first_name, customer_last_name,
                       sender_email, sender_organization_name, sender_first_name, sender_last_name,
                       case_ref, request_type, property_value, notes, external_id, meta_data,
                       calculation_fee_exempt, calculation_fee_exempt_reason, calculation_id,
                       secret_salt, secret_key_id, sequence
                  FROM calculation_request
                 WHERE external_id IS NOT NULL
                   AND (conveyancer_id, external_id) >= ($1, $2)
                   AND (conveyancer_id, external_id, id) < ($1, $2, $3)
                 ORDER BY conveyancer_id DESC, external_id DESC, id DESC
                 LIMIT 101) AS newest
         ORDER BY conveyancer_id DESC, external_id DESC, id DESC
         LIMIT $4
        """,
        conveyancer_id,
        external_id,
        before,
        limit,
    )
    return [CalculationRequest(**row) for row in rows]


async def read(connection: Connection, request_id: UUID) -> CalculationRequest:
    """Return a request of any conveyancer. For the consumers alone. Raises RequestNotFound."""
    row = await connection.fetchrow(
        """
        SELECT id, conveyancer_id, created_at, updated_at,
               customer_email, customer_phone, customer_first_name, customer_last_name,
               sender_email, sender_organization_name, sender_first_name, sender_last_name,
               case_ref, request_type, property_value, notes, external_id, meta_data,
               calculation_fee_exempt, calculation_fee_exempt_reason, calculation_id,
               secret_salt, secret_key_id, sequence
          FROM calculation_request
         WHERE id = $1
        """,
        request_id,
    )
    if row is None:
        raise RequestNotFound
    return CalculationRequest(**row)


async def sample_secret_keys(connection: Connection) -> dict[str, int]:
    """Return the keys of stored secrets, and how many requests that were looked at have each.

    Looks at the oldest and the newest thousand, and at ten thousand spread evenly over the time between: 500
    times twenty. Few enough for a second, by the primary key, which is the order in time.
    """
    rows = await connection.fetch(
        """
        WITH ends AS (
            SELECT (SELECT id FROM calculation_request ORDER BY id LIMIT 1) AS oldest,
                   (SELECT id FROM calculation_request ORDER BY id DESC LIMIT 1) AS newest
        ),
        times AS (
            SELECT ('x0000' || left(replace(oldest::text, '-', ''), 12))::bit(64)::bigint AS began,
                   ('x0000' || left(replace(newest::text, '-', ''), 12))::bit(64)::bigint AS ended
              FROM ends
             WHERE oldest IS NOT NULL
        ),
        looks AS (
            SELECT rpad(lpad(to_hex(began + (ended - began) * number / 500), 12, '0'), 32, '0')::uuid AS since
              FROM times, generate_series(0, 499) AS number
        ),
        sampled AS (
            (SELECT id, secret_key_id FROM calculation_request ORDER BY id LIMIT 1000)
            UNION
            (SELECT id, secret_key_id FROM calculation_request ORDER BY id DESC LIMIT 1000)
            UNION
            SELECT near.id, near.secret_key_id
              FROM looks,
                   LATERAL (SELECT id, secret_key_id
                              FROM calculation_request
                             WHERE id >= since
                             ORDER BY id
                             LIMIT 20) AS near
        )
        SELECT secret_key_id, count(*) AS requests
          FROM sampled
         GROUP BY secret_key_id
        """
    )
    return {row["secret_key_id"]: row["requests"] for row in rows}


async def lock(connection: Connection, request_id: UUID) -> CalculationRequest:
    """Return a request and keep its row locked until the transaction ends, so that its events are in order.

    For the consumers alone, who act for every conveyancer. Raises RequestNotFound.
    """
    row = await connection.fetchrow(
        """
        SELECT id, conveyancer_id, created_at, updated_at,
               customer_email, customer_phone, customer_first_name, customer_last_name,
               sender_email, sender_organization_name, sender_first_name, sender_last_name,
               case_ref, request_type, property_value, notes, external_id, meta_data,
               calculation_fee_exempt, calculation_fee_exempt_reason, calculation_id,
               secret_salt, secret_key_id, sequence
          FROM calculation_request
         WHERE id = $1
           FOR NO KEY UPDATE
        """,
        request_id,
    )
    if row is None:
        raise RequestNotFound
    return CalculationRequest(**row)


async def record_calculation(
    connection: Connection, request: CalculationRequest, calculation_id: str, *, traceparent: str | None
) -> None:
    """Set the calculation of a locked request, and announce it."""
    updated_at = now()
    event = events.RequestCalculated(
        **request.facts(sequence=request.sequence + 1), calculation_id=calculation_id
    )
    await connection.execute(
        """
        UPDATE calculation_request
           SET calculation_id = $2,
               calculation_sequence = $3,
               updated_at = $4
         WHERE id = $1
        """,
        request.id,
        calculation_id,
        event.sequence,
        updated_at,
    )
    await announce(connection, request, event, time=updated_at, traceparent=traceparent)


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
