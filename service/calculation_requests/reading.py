"""The statements that read calculation requests."""

import hmac
from collections.abc import Collection
from uuid import UUID

import msgspec

from service.calculation_requests import conveyancers, erased
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.model import (
    AnnouncedRequest,
    CalculationRequest,
    Idempotency,
    IdempotencyKeyReused,
    RequestErased,
    RequestNotFound,
    with_columns,
)
from service.calculation_requests.request_secrets import SecretKeyMissing, SecretKeyRing, WrongSecret
from service.postgres.pool import Connection


async def find_by_idempotency_key(
    connection: Connection, idempotency: Idempotency, *, conveyancer_id: str
) -> CalculationRequest | None:
    """Return the request that was stored with this key, or None.

    Raises IdempotencyKeyReused if its body was another one, RequestErased and UnknownConveyancer.
    """
    row = await connection.fetchrow(
        """
        SELECT request.id, request.idempotency_sha256, erased.id AS erased_id
          FROM active_conveyancer AS conveyancer
          LEFT JOIN calculation_request AS request
            ON request.conveyancer_id = conveyancer.id
           AND request.idempotency_key = $1
          LEFT JOIN erased_request AS erased
            ON erased.conveyancer_id = conveyancer.id
           AND erased.key_sha256 = sha256(convert_to($1, 'UTF8'))
         WHERE conveyancer.id = $2
        """,
        idempotency.key,
        conveyancer_id,
    )
    if row is None:
        raise UnknownConveyancer
    if row["erased_id"] is not None:
        raise RequestErased
    if row["id"] is None:
        return None
    if row["idempotency_sha256"] != idempotency.sha256:
        raise IdempotencyKeyReused
    return await find(connection, row["id"], conveyancer_id=conveyancer_id)


async def find(connection: Connection, request_id: UUID, *, conveyancer_id: str) -> CalculationRequest:
    """Return a request of this conveyancer.

    Raises RequestErased, RequestNotFound, also when it is another conveyancer's, and UnknownConveyancer.
    """
    row = await connection.fetchrow(_FIND, request_id, conveyancer_id)
    if row is None:
        raise UnknownConveyancer
    if row["id"] is None:
        raise RequestErased if row["is_erased"] else RequestNotFound
    return CalculationRequest(*row[:-1])


# Erased requests are looked for only if there is no row.
_FIND = with_columns(
    """
    SELECT {request_columns},
           CASE WHEN request.id IS NULL
                THEN EXISTS (SELECT
                               FROM erased_request
                              WHERE id = $1
                                AND conveyancer_id = $2)
                END AS is_erased
      FROM active_conveyancer AS conveyancer
      LEFT JOIN calculation_request AS request
        ON request.id = $1
       AND request.conveyancer_id = conveyancer.id
     WHERE conveyancer.id = $2
    """
)


async def find_by_secret(
    connection: Connection, request_id: UUID, *, secret: str, keys: SecretKeyRing
) -> CalculationRequest:
    """Return the request that this ASCII secret opens, without what is its firm's alone.

    Raises WrongSecret, also when there is no such request, or when the key of its secret is missing, which is
    logged.
    """
    row = await connection.fetchrow(_FIND_BY_SECRET, request_id)
    # It takes as long without a request or its key: the time must not show which uuids exist.
    salt, key_id = (row["secret_salt"], row["secret_key_id"]) if row else (request_id.bytes, keys.current_id)
    try:
        expected = keys.secret(request_id, salt=salt, key_id=key_id)
    except SecretKeyMissing as error:
        keys.report_missing(error)
        row, expected = None, keys.secret(request_id, salt=salt, key_id=keys.current_id)
    # Encoded, because several texts decode to the same bytes.
    if not hmac.compare_digest(expected.encode(), secret.encode()) or row is None:
        raise WrongSecret
    return CalculationRequest(*row)


_FIND_BY_SECRET = with_columns(
    """
    SELECT {customer_columns}
      FROM calculation_request
     WHERE id = $1
    """
)


async def read_internally(connection: Connection, request_id: UUID) -> CalculationRequest:
    """Return a request of any conveyancer, for an internal reader.

    Raises RequestErased and RequestNotFound.
    """
    row = await connection.fetchrow(_READ_INTERNALLY, request_id)
    if row is None:
        await erased.check(connection, request_id)
        raise RequestNotFound
    return CalculationRequest(*row)


# One of the two statements behind an access token that are not limited to one conveyancer. The other is that
# of `event_history.read`.
_READ_INTERNALLY = with_columns(
    """
    SELECT {request_columns}
      FROM calculation_request AS request
     WHERE request.id = $1
    """
)


class Listing(msgspec.Struct, frozen=True):
    """Which requests to list: at most *limit* up to 100, older than *before*, with *external_id* if given."""

    external_id: str | None
    limit: int
    before: UUID


async def read_page(
    connection: Connection, listing: Listing, *, conveyancer_id: str
) -> tuple[list[CalculationRequest], str | None]:
    """Return a page of this conveyancer's requests, newest first, and the cursor of the next page, if any.

    A cursor is a position, not a promise: it is always read within the conveyancer's own requests. Raises
    UnknownConveyancer.
    """
    if listing.external_id is None:
        arguments = [_LIST_NEWEST, conveyancer_id]
    else:
        arguments = [_LIST_NEWEST_BY_EXTERNAL_ID, conveyancer_id, listing.external_id]
    rows = await connection.fetch(*arguments, listing.before, listing.limit + 1)
    if not rows:
        await conveyancers.check_registered(connection, conveyancer_id)
    page = [CalculationRequest(*row) for row in rows[: listing.limit]]
    return page, page[-1].uuid if len(rows) > listing.limit else None


# Both compare and order by all columns of their index. With `conveyancer_id = $1` the planner drops that
# column from the order and may read the primary key backwards: Postgres 18, with a generic plan, read 395,000
# rows of other conveyancers for a page of 21 (8,699 blocks instead of 4). The constant limit, one more than
# the largest page has, makes a generic plan expect a small page.
_LIST_NEWEST = with_columns(
    """
    SELECT *
      FROM (SELECT {columns}
              FROM calculation_request
             WHERE conveyancer_id >= $1
               AND (conveyancer_id, id) < ($1, $2)
               AND EXISTS (SELECT FROM active_conveyancer WHERE id = $1)
             ORDER BY conveyancer_id DESC, id DESC
             LIMIT 101) AS newest
     ORDER BY conveyancer_id DESC, id DESC
     LIMIT $3
    """
)
_LIST_NEWEST_BY_EXTERNAL_ID = with_columns(
    """
    SELECT *
      FROM (SELECT {columns}
              FROM calculation_request
             WHERE external_id IS NOT NULL
               AND (conveyancer_id, external_id) >= ($1, $2)
               AND (conveyancer_id, external_id, id) < ($1, $2, $3)
               AND EXISTS (SELECT FROM active_conveyancer WHERE id = $1)
             ORDER BY conveyancer_id DESC, external_id DESC, id DESC
             LIMIT 101) AS newest
     ORDER BY conveyancer_id DESC, external_id DESC, id DESC
     LIMIT $4
    """
)


async def lock_all(connection: Connection, request_ids: Collection[UUID]) -> dict[UUID, AnnouncedRequest]:
    """Lock the rows of these requests until the transaction ends, and return those that exist.

    So the events of each stay in order. The rows are locked in the order of their ids, so that transactions
    with several requests do not deadlock. For workers and operators, not for the API.
    """
    rows = await connection.fetch(_LOCK_ALL, request_ids)
    return {row["id"]: AnnouncedRequest(*row) for row in rows}


async def lock_free(connection: Connection, request_ids: Collection[UUID]) -> dict[UUID, AnnouncedRequest]:
    """Lock as `lock_all` does, but leave out the rows that another transaction has locked, without waiting.

    So one row that is locked for minutes, by hand for instance, does not delay a batch. Only for the worker.
    """
    rows = await connection.fetch(_LOCK_FREE, request_ids)
    return {row["id"]: AnnouncedRequest(*row) for row in rows}


_LOCK_ALL = f"""
    SELECT {", ".join(AnnouncedRequest.__struct_fields__)}
      FROM calculation_request
     WHERE id = ANY($1)
     ORDER BY id
       FOR NO KEY UPDATE
"""  # noqa: S608 - constants only
_LOCK_FREE = f"{_LOCK_ALL} SKIP LOCKED"


async def find_existing(connection: Connection, request_ids: Collection[UUID]) -> set[UUID]:
    """Return the ids of those of these requests that exist. Only for the worker."""
    rows = await connection.fetch("SELECT id FROM calculation_request WHERE id = ANY($1)", request_ids)
    return {row["id"] for row in rows}


async def sample_secret_keys(connection: Connection) -> dict[str, int]:
    """Return the ids of the keys of stored secrets, and how many requests of a sample have each."""
    rows = await connection.fetch(_SAMPLE_KEY_IDS)
    return {row["secret_key_id"]: row["requests"] for row in rows}


# The sample is the oldest and the newest thousand requests, and ten thousand spread evenly over the time
# between: 500 times twenty. It is read within a second, by the primary key, which is the order in time.
_SAMPLE_KEY_IDS = """
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
