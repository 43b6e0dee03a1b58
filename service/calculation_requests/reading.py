"""The statements that read calculation requests: for a firm, for a secret, and for internal readers."""

import hmac
from collections.abc import Collection
from typing import Any, NoReturn
from uuid import UUID

import msgspec

from service.calculation_requests import conveyancers
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.model import (
    COLUMNS,
    FOR_CUSTOMER,
    REQUEST_COLUMNS,
    CalculationRequest,
    Idempotency,
    IdempotencyKeyReused,
    RequestErased,
    RequestNotFound,
    request_in,
)
from service.calculation_requests.request_secrets import SecretKeyMissing, SecretKeyRing, WrongSecret
from service.postgres.connections import REPLICATE
from service.postgres.pool import Connection


async def find_by_idempotency_key(
    connection: Connection, idempotency: Idempotency, *, conveyancer_id: str
) -> CalculationRequest | None:
    """Return the request that was stored with this key, or None. Waits until a synchronous standby has it.

    Raises UnknownConveyancer, RequestErased and, if the bodies differ, IdempotencyKeyReused.
    """
    row = await connection.fetchrow(_FIND_BY_IDEMPOTENCY_KEY, idempotency.key, conveyancer_id)
    if row is None:
        raise UnknownConveyancer
    if row["erased_id"] is not None:
        raise RequestErased
    if row["id"] is None:
        return None
    if row["idempotency_sha256"] != idempotency.sha256:
        raise IdempotencyKeyReused
    return request_in(row)


_FIND_BY_IDEMPOTENCY_KEY = f"""
    SELECT {REQUEST_COLUMNS}, request.idempotency_sha256, erased.id AS erased_id,
           CASE WHEN request.id IS NOT NULL THEN {REPLICATE} END
      FROM active_conveyancer AS conveyancer
      LEFT JOIN calculation_request AS request
        ON request.conveyancer_id = conveyancer.id
       AND request.idempotency_key = $1
      LEFT JOIN erased_request AS erased
        ON erased.conveyancer_id = conveyancer.id
       AND erased.key_sha256 = sha256(convert_to($1, 'UTF8'))
     WHERE conveyancer.id = $2
"""  # noqa: S608 - constants only


async def find(connection: Connection, request_id: UUID, *, conveyancer_id: str) -> CalculationRequest:
    """Return a request of this conveyancer. Raises RequestErased, RequestNotFound, UnknownConveyancer."""
    row = await connection.fetchrow(_FIND, request_id, conveyancer_id)
    if row is None:
        raise UnknownConveyancer
    if row["id"] is None:
        raise RequestErased if row["is_erased"] else RequestNotFound
    return request_in(row)


# Reads erased_request only if no stored request matches.
_FIND = f"""
    SELECT {REQUEST_COLUMNS},
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
"""  # noqa: S608 - constants only


async def find_by_secret(
    connection: Connection, request_id: UUID, *, secret: str, keys: SecretKeyRing
) -> CalculationRequest:
    """Return the request that this ASCII secret opens, with only the fields that its customer may see.

    Raises WrongSecret (401) if the secret is wrong or its key is missing, or the request gone or withdrawn.
    """
    row = await connection.fetchrow(_FIND_FOR_CUSTOMER, request_id)
    if row is None:
        raise WrongSecret
    try:
        expected = keys.secret(request_id, salt=row["secret_salt"], key_id=row["secret_key_id"])
    except SecretKeyMissing:
        raise WrongSecret from None
    # Compares the texts, because several texts decode to the same bytes.
    if not hmac.compare_digest(expected.encode(), secret.encode()):
        raise WrongSecret
    return request_in(dict.fromkeys(CalculationRequest.__struct_fields__) | dict(row))


# Selects what the customer may see, and what the secret is derived from. Every other field is None.
_FIND_FOR_CUSTOMER = f"""
    SELECT id, secret_salt, secret_key_id, {", ".join(FOR_CUSTOMER)}
      FROM calculation_request
     WHERE id = $1
       AND withdrawn_at IS NULL
"""  # noqa: S608 - constants only


async def read_internally(connection: Connection, request_id: UUID) -> CalculationRequest:
    """Return a request of any conveyancer. Raises RequestErased and RequestNotFound."""
    row = await connection.fetchrow(_READ_INTERNALLY, request_id)
    if row is None:
        await raise_not_found(connection, request_id)
    return request_in(row)


# One of the two statements with which an access token can read requests of any conveyancer. The other is
# in `event_history.read_internally`.
_READ_INTERNALLY = f"""
    SELECT {REQUEST_COLUMNS}
      FROM calculation_request AS request
     WHERE request.id = $1
"""  # noqa: S608 - constants only


LARGEST_PAGE = 1024 * 1024  # bytes of rows; the envelope, secrets and links add at most 30 KB
_ROWS_AT_A_TIME = 21  # a page of the default size and the row after it; at most 1.2 MB


async def read_page(
    connection: Connection, *, conveyancer_id: str, external_id: str | None, after: UUID, limit: int
) -> tuple[list[CalculationRequest], UUID | None]:
    """Return a page of this conveyancer's requests *after* an id, newest first; if given, with *external_id*.

    A page has at most *limit* requests and at most LARGEST_PAGE bytes, because a request may have 57 KB, and
    many callers may read pages at the same time. Returns also the id after which the next page begins, if
    there is one. Raises UnknownConveyancer.

    A cursor grants no access: whatever it says, a page has only this conveyancer's requests.
    """
    arguments: list[Any] = [_LIST_NEWEST, conveyancer_id]
    if external_id is not None:
        arguments = [_LIST_NEWEST_BY_EXTERNAL_ID, conveyancer_id, external_id]
    page: list[CalculationRequest] = []
    size, count = 0, min(limit + 1, _ROWS_AT_A_TIME)
    while rows := await connection.fetch(*arguments, after, count):
        for row in rows:
            request = request_in(row)
            size += len(msgspec.json.encode(request))
            if len(page) == limit or size > LARGEST_PAGE:
                return page, after
            page.append(request)
            after = request.id
        if len(rows) < count:
            return page, None
    await conveyancers.charges_calculation_fee(connection, conveyancer_id)  # Raises UnknownConveyancer.
    return page, None


# The statements name all columns of their index, in WHERE and in ORDER BY. With `conveyancer_id = $1` the
# planner would drop this column from the order, and might read the primary key backwards. Postgres 18 then
# read 395,000 rows of other conveyancers for a page of 21: 8,699 blocks instead of 4. The inner limit is a
# constant, one more than the largest page, so that a generic plan expects a small page.
_LIST_NEWEST = f"""
    SELECT *
      FROM (SELECT {COLUMNS}
              FROM calculation_request
             WHERE conveyancer_id >= $1
               AND (conveyancer_id, id) < ($1, $2)
               AND EXISTS (SELECT FROM active_conveyancer WHERE id = $1)
             ORDER BY conveyancer_id DESC, id DESC
             LIMIT 101) AS newest
     ORDER BY conveyancer_id DESC, id DESC
     LIMIT $3
"""  # noqa: S608 - constants only
_LIST_NEWEST_BY_EXTERNAL_ID = f"""
    SELECT *
      FROM (SELECT {COLUMNS}
              FROM calculation_request
             WHERE external_id IS NOT NULL
               AND (conveyancer_id, external_id) >= ($1, $2)
               AND (conveyancer_id, external_id, id) < ($1, $2, $3)
               AND EXISTS (SELECT FROM active_conveyancer WHERE id = $1)
             ORDER BY conveyancer_id DESC, external_id DESC, id DESC
             LIMIT 101) AS newest
     ORDER BY conveyancer_id DESC, external_id DESC, id DESC
     LIMIT $4
"""  # noqa: S608 - constants only


async def raise_not_found(connection: Connection, request_id: UUID) -> NoReturn:
    """Raise RequestErased if a request of any conveyancer with this id was erased, else RequestNotFound."""
    raise RequestErased if await find_erased(connection, [request_id]) else RequestNotFound


async def find_erased(connection: Connection, request_ids: Collection[UUID]) -> set[UUID]:
    """Return which of these requests, of any conveyancer, were erased."""
    rows = await connection.fetch("SELECT id FROM erased_request WHERE id = ANY($1)", request_ids)
    return {row["id"] for row in rows}


async def find_existing(connection: Connection, request_ids: Collection[UUID]) -> set[UUID]:
    """Return which of these requests exist. Not for the API."""
    rows = await connection.fetch("SELECT id FROM calculation_request WHERE id = ANY($1)", request_ids)
    return {row["id"] for row in rows}
