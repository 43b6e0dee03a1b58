"""The conveyancers, who are the tenants: their names, and whether they charge a calculation fee."""

from datetime import datetime

import msgspec

from service.postgres.pool import Connection


class UnknownConveyancer(Exception):
    """No conveyancer is registered under this identifier, or it is disabled."""


async def register(
    connection: Connection, conveyancer_id: str, *, name: str, charges_calculation_fee: bool
) -> bool:
    """Register a conveyancer, or change the name and fee setting of a registered one.

    Returns whether it is disabled. Its id and name are lines of text, which the command line has checked.
    """
    is_disabled: bool = await connection.fetchval(
        """
        INSERT INTO conveyancer (id, name, charges_calculation_fee)
        VALUES ($1, $2, $3)
        ON CONFLICT (id) DO UPDATE
           SET name = excluded.name,
               charges_calculation_fee = excluded.charges_calculation_fee
        RETURNING disabled_at IS NOT NULL
        """,
        conveyancer_id,
        name,
        charges_calculation_fee,
    )
    return is_disabled


class Conveyancer(msgspec.Struct, frozen=True):
    """A registered law firm."""

    id: str
    name: str
    charges_calculation_fee: bool
    disabled_at: datetime | None


async def list_all(connection: Connection) -> list[Conveyancer]:
    """Return every conveyancer, by id."""
    rows = await connection.fetch(
        """
        SELECT id, name, charges_calculation_fee, disabled_at
          FROM conveyancer
         ORDER BY id
        """
    )
    return [Conveyancer(*row) for row in rows]


async def charges_calculation_fee(connection: Connection, conveyancer_id: str) -> bool:
    """Whether this conveyancer charges a calculation fee. Raises UnknownConveyancer."""
    charges = await connection.fetchval(
        """
        SELECT charges_calculation_fee
          FROM active_conveyancer
         WHERE id = $1
        """,
        conveyancer_id,
    )
    if charges is None:
        raise UnknownConveyancer
    return bool(charges)
