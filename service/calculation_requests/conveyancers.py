"""The conveyancers, who are the tenants: their names, and whether they charge a calculation fee."""

from service import lines
from service.postgres.pool import Connection


class UnknownConveyancer(Exception):
    """No conveyancer is registered under this identifier."""


class InvalidConveyancer(Exception):
    """The id or the name of a conveyancer is not acceptable; the message says why."""


async def register(
    connection: Connection, conveyancer_id: str, *, name: str, charges_calculation_fee: bool
) -> None:
    """Register a conveyancer, or change the name and fee setting of a registered one.

    Raises InvalidConveyancer.
    """
    _check("id", conveyancer_id)
    _check("name", name)
    await connection.execute(
        """
        INSERT INTO conveyancer (id, name, charges_calculation_fee)
        VALUES ($1, $2, $3)
        ON CONFLICT (id) DO UPDATE
           SET name = excluded.name,
               charges_calculation_fee = excluded.charges_calculation_fee
        """,
        conveyancer_id,
        name,
        charges_calculation_fee,
    )


def _check(field: str, value: str) -> None:
    if fault := lines.check_filled_line(value):
        raise InvalidConveyancer(f"the {field} of a conveyancer: {fault.message}")
    if len(value) > lines.CHARACTERS:
        raise InvalidConveyancer(f"the {field} of a conveyancer: more than {lines.CHARACTERS} characters")


async def list_all(connection: Connection) -> list[tuple[str, str, bool]]:
    """Return (id, name, charges_calculation_fee) of every conveyancer, by id."""
    rows = await connection.fetch(
        """
        SELECT id, name, charges_calculation_fee
          FROM conveyancer
         ORDER BY id
        """
    )
    return [(row["id"], row["name"], row["charges_calculation_fee"]) for row in rows]


async def charges_calculation_fee(connection: Connection, conveyancer_id: str) -> bool:
    """Whether this conveyancer charges a calculation fee. Raises UnknownConveyancer."""
    charges = await connection.fetchval(
        """
        SELECT charges_calculation_fee
          FROM conveyancer
         WHERE id = $1
        """,
        conveyancer_id,
    )
    if charges is None:
        raise UnknownConveyancer
    return bool(charges)


async def check_registered(connection: Connection, conveyancer_id: str) -> None:
    """Raise UnknownConveyancer unless this conveyancer is registered."""
    if not await connection.fetchval("SELECT EXISTS (SELECT FROM conveyancer WHERE id = $1)", conveyancer_id):
        raise UnknownConveyancer
