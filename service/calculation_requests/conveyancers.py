"""The conveyancers, which are the tenants: their names, and whether they charge a calculation fee."""

from datetime import datetime

import asyncpg

from service.postgres.pool import Connection


class UnknownConveyancer(Exception):
    """No conveyancer is registered under this identifier, or it is disabled."""


async def register(
    connection: Connection, conveyancer_id: str, *, name: str, charges_calculation_fee: bool | None
) -> tuple[asyncpg.Record | None, asyncpg.Record]:
    """Register a conveyancer, or change a registered one, in the caller's transaction.

    Returns the conveyancer before the change (None if it is new) and after it. A fee setting of None keeps
    the present setting. A new conveyancer then charges no fee. The command line has checked the texts.
    """
    before = await connection.fetchrow(
        f"SELECT {_COLUMNS} FROM conveyancer WHERE id = $1 FOR NO KEY UPDATE",  # noqa: S608 - constants only
        conveyancer_id,
    )
    (after,) = await connection.fetch(
        f"""
        INSERT INTO conveyancer (id, name, charges_calculation_fee)
        VALUES ($1, $2, coalesce($3, false))
        ON CONFLICT (id) DO UPDATE
           SET name = excluded.name,
               charges_calculation_fee = coalesce($3, conveyancer.charges_calculation_fee)
        RETURNING {_COLUMNS}
        """,  # noqa: S608 - constants only
        conveyancer_id,
        name,
        charges_calculation_fee,
    )
    return before, after


_COLUMNS = "id, name, charges_calculation_fee, disabled_at"


async def list_all(connection: Connection) -> list[asyncpg.Record]:
    """Return every conveyancer, in the order of their ids."""
    return await connection.fetch(f"SELECT {_COLUMNS} FROM conveyancer ORDER BY id")  # noqa: S608 - likewise


async def count_requests(connection: Connection, month: datetime | None) -> list[asyncpg.Record]:
    """Return the usage of every conveyancer in the month that begins then, or in the current one, in UTC.

    The events of erased requests are kept, so a month's figures never change. This reads all events: 2 s for
    two million.
    """
    return await connection.fetch(
        """
        SELECT conveyancer.id AS conveyancer, name, to_char(begins, 'YYYY-MM') AS month,
               count(*) FILTER (WHERE type = 'request.created') AS requests,
               count(*) FILTER (WHERE type = 'request.created'
                                  AND (data ->> 'calculation_fee_exempt')::boolean) AS fee_exempt,
               count(*) FILTER (WHERE type = 'request.calculated') AS calculated,
               count(*) FILTER (WHERE type = 'request.withdrawn') AS withdrawn,
               count(*) FILTER (WHERE type = 'request.erased') AS erased
          FROM conveyancer
         CROSS JOIN coalesce($1::timestamp, date_trunc('month', now() AT TIME ZONE 'UTC')) AS begins
          LEFT JOIN event
            ON conveyancer_id = conveyancer.id
           AND time >= begins AT TIME ZONE 'UTC'
           AND time < (begins + interval '1 month') AT TIME ZONE 'UTC'
         GROUP BY conveyancer.id, begins
         ORDER BY conveyancer.id
        """,
        month,
    )


async def check_registered(connection: Connection, conveyancer_id: str) -> None:
    """Raise UnknownConveyancer unless this conveyancer, which may be disabled, is registered."""
    if not await connection.fetchval("SELECT true FROM conveyancer WHERE id = $1", conveyancer_id):
        raise UnknownConveyancer


async def charges_calculation_fee(connection: Connection, conveyancer_id: str) -> bool:
    """Whether this conveyancer charges a calculation fee. Raises UnknownConveyancer."""
    charges = await connection.fetchval(
        "SELECT charges_calculation_fee FROM active_conveyancer WHERE id = $1", conveyancer_id
    )
    if charges is None:
        raise UnknownConveyancer
    return bool(charges)
