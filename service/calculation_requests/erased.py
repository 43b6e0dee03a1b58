"""The statements that look for requests that were erased."""

from collections.abc import Collection
from datetime import datetime
from uuid import UUID

from service.calculation_requests.model import RequestErased
from service.postgres.pool import Connection


async def check(connection: Connection, request_id: UUID) -> None:
    """Raise RequestErased if this was a request of any conveyancer."""
    if await among(connection, [request_id]):
        raise RequestErased


async def read_time(connection: Connection, request_id: UUID) -> datetime | None:
    """Return when a request of any conveyancer was erased, if it was."""
    at: datetime | None = await connection.fetchval(
        "SELECT erased_at FROM erased_request WHERE id = $1", request_id
    )
    return at


async def among(connection: Connection, request_ids: Collection[UUID]) -> set[UUID]:
    """Return those of these requests, of any conveyancer, that were erased."""
    rows = await connection.fetch("SELECT id FROM erased_request WHERE id = ANY($1)", request_ids)
    return {row["id"] for row in rows}
