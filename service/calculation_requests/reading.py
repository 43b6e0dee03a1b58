"""The statements that read calculation requests: for a firm, for a secret, and for internal readers."""

import hmac
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from typing import NoReturn
from uuid import UUID

import msgspec

from service.calculation_requests import conveyancers, model
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.model import COLUMNS, REQUEST_COLUMNS, CalculationRequest, request_in
from service.calculation_requests.request_secrets import SecretKeyMissing, SecretKeyRing, WrongSecret
from service.postgres.connections import REPLICATE
from service.postgres.pool import Connection


async def find_by_idempotency_key(
    connection: Connection, idempotency: model.Idempotency, *, conveyancer_id: str
) -> CalculationRequest | None:
    """Return the request that was stored with this key, or None. Waits until a synchronous standby has it.

    Raises UnknownConveyancer, AlreadyErased and, if the bodies differ, IdempotencyKeyReused.
    """
    row = await connection.fetchrow(_FIND_BY_IDEMPOTENCY_KEY, idempotency.key, conveyancer_id)
    if row is None:
        raise UnknownConveyancer
    if row["erased_id"] is not None:
        raise model.AlreadyErased
    if row["id"] is None:
        return None
    if row["idempotency_sha256"] != idempotency.sha256:
        raise model.IdempotencyKeyReused
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
    """Return a request of this conveyancer. Raises AlreadyErased, RequestNotFound, UnknownConveyancer."""
    row = await connection.fetchrow(_FIND, request_id, conveyancer_id)
    if row is None:
        raise UnknownConveyancer
    if row["id"] is None:
        raise model.AlreadyErased if row["is_erased"] else model.RequestNotFound
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
    SELECT id, secret_salt, secret_key_id, {", ".join(model.FOR_CUSTOMER)}
      FROM calculation_request
     WHERE id = $1
       AND withdrawn_at IS NULL
"""  # noqa: S608 - constants only


async def read_internally(connection: Connection, request_id: UUID) -> CalculationRequest:
    """Return a request of any conveyancer. Raises AlreadyErased and RequestNotFound."""
    # The one statement with which an access token can read requests of any conveyancer.
    row = await connection.fetchrow(
        f"SELECT {COLUMNS} FROM calculation_request WHERE id = $1",  # noqa: S608 - constants only
        request_id,
    )
    if row is None:
        await raise_not_found(connection, request_id)
    return request_in(row)


LARGEST_PAGE = 1024 * 1024  # bytes of rows; the envelope, secrets and links add at most 30 KB
_ROWS_AT_A_TIME = 21  # a page of the default size and the row after it; at most 1.2 MB


async def read_page(
    connection: Connection, conveyancer_id: str, filters: Mapping[str, str], *, after: UUID, limit: int
) -> tuple[list[CalculationRequest], UUID | None]:
    """Return a page of this conveyancer's requests, newest first, and after which id the next one begins.

    A page has at most *limit* requests and at most LARGEST_PAGE bytes, because a request may have 57 KB.
    Each name in *filters* is a column, and never a caller's text. Whatever a cursor says, a page has only
    this conveyancer's requests. Raises UnknownConveyancer.
    """
    arguments = [_list_newest(*filters), conveyancer_id, *filters.values()]
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


# The statement names all columns of its index, in WHERE and in ORDER BY. With `conveyancer_id = $1` the
# planner would drop this column from the order, and might read the primary key backwards. Postgres 18 then
# read 395,000 rows of other conveyancers for a page of 21: 8,699 blocks instead of 4. The inner limit is a
# constant, one more than the largest page, so that a generic plan expects a small page. With several filters
# Postgres reads the index of the first, and sorts. The index of a nullable column has no nulls.
@cache
def _list_newest(*filters: str) -> str:
    columns = ("conveyancer_id", *filters)
    names, values = ", ".join(columns), ", ".join(f"${place}" for place, _ in enumerate(columns, 1))
    order = ", ".join(f"{name} DESC" for name in (*columns, "id"))
    return f"""
    SELECT *
      FROM (SELECT {COLUMNS}
              FROM calculation_request
             WHERE {"".join(f"{name} IS NOT NULL AND " for name in filters)}({names}) >= ({values})
               AND ({names}, id) < ({values}, ${len(columns) + 1})
               AND EXISTS (SELECT FROM active_conveyancer WHERE id = $1)
             ORDER BY {order}
             LIMIT 101) AS newest
     ORDER BY {order}
     LIMIT ${len(columns) + 2}
    """  # noqa: S608 - constants only


async def raise_not_found(connection: Connection, request_id: UUID) -> NoReturn:
    """Raise AlreadyErased if a request of any conveyancer with this id was erased, else RequestNotFound."""
    raise model.AlreadyErased if await find_erased(connection, [request_id]) else model.RequestNotFound


async def check_known(connection: Connection, request_id: UUID) -> None:
    """Raise RequestNotFound unless this request, of any conveyancer, exists or was erased."""
    with suppress(model.AlreadyErased):
        await read_internally(connection, request_id)


async def find_erased(connection: Connection, request_ids: Collection[UUID]) -> set[UUID]:
    """Return which of these requests, of any conveyancer, were erased."""
    rows = await connection.fetch("SELECT id FROM erased_request WHERE id = ANY($1)", request_ids)
    return {row["id"] for row in rows}


async def find_existing(connection: Connection, request_ids: Collection[UUID]) -> set[UUID]:
    """Return which of these requests exist. Not for the API."""
    rows = await connection.fetch("SELECT id FROM calculation_request WHERE id = ANY($1)", request_ids)
    return {row["id"] for row in rows}
