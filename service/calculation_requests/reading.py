"""The statements that read calculation requests."""

from uuid import UUID

from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.idempotency import Idempotency, IdempotencyKeyInFlight, IdempotencyKeyReused
from service.calculation_requests.model import CalculationRequest, RequestNotFound
from service.postgres.pool import Connection


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
