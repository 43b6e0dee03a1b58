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


async def charges_calculation_fee(connection: Connection, conveyancer_id: str) -> bool:
    """Whether this conveyancer charges a calculation fee. Raises UnknownConveyancer."""
    charges = await connection.fetchval(
        "SELECT charges_calculation_fee FROM active_conveyancer WHERE id = $1", conveyancer_id
    )
    if charges is None:
        raise UnknownConveyancer
    return bool(charges)
