"""The conveyancers, which are the tenants: their names, and whether they charge a calculation fee."""

from datetime import datetime

import msgspec

from service.postgres.pool import Connection


class UnknownConveyancer(Exception):
    """No conveyancer is registered under this identifier, or it is disabled."""


class Conveyancer(msgspec.Struct, frozen=True):
    """A registered law firm."""

    id: str
    name: str
    charges_calculation_fee: bool
    disabled_at: datetime | None


async def register(
    connection: Connection, conveyancer_id: str, *, name: str, charges_calculation_fee: bool | None
) -> tuple[Conveyancer | None, Conveyancer]:
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
    return Conveyancer(**before) if before else None, Conveyancer(**after)


_COLUMNS = ", ".join(Conveyancer.__struct_fields__)


async def list_all(connection: Connection) -> list[Conveyancer]:
    """Return every conveyancer, in the order of their ids."""
    rows = await connection.fetch(f"SELECT {_COLUMNS} FROM conveyancer ORDER BY id")  # noqa: S608 - likewise
    return [Conveyancer(**row) for row in rows]


class Usage(msgspec.Struct, frozen=True):
    """How many requests a conveyancer made in a month, and how many were calculated, … in that month."""

    conveyancer: str
    name: str
    month: str
    requests: int
    fee_exempt: int
    calculated: int
    withdrawn: int
    erased: int


async def count_requests(connection: Connection, month: datetime | None) -> list[Usage]:
    """Return the usage of every conveyancer in the month that begins then, or in the current one, in UTC.

    The events of erased requests are kept, so a month's figures never change. This reads all events: 2 s for
    two million.
    """
    rows = await connection.fetch(
        """
        SELECT conveyancer.id, name, to_char(begins, 'YYYY-MM'),
               count(*) FILTER (WHERE type = 'request.created'),
               count(*) FILTER (WHERE type = 'request.created'
                                  AND (data ->> 'calculation_fee_exempt')::boolean),
               count(*) FILTER (WHERE type = 'request.calculated'),
               count(*) FILTER (WHERE type = 'request.withdrawn'),
               count(*) FILTER (WHERE type = 'request.erased')
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
    return [Usage(*row) for row in rows]


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
