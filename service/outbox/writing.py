"""The writing side of the outbox: the lane of an event, and the wake-up of the relays."""

from uuid import UUID

from service.postgres.pool import Connection

LANES = 16
CHANNEL = "outbox"  # of LISTEN and NOTIFY


def lane_of(request_id: UUID) -> int:
    """Return the lane of a request: its events share one, and so keep their order with many relays."""
    return request_id.int % LANES


async def notify(connection: Connection) -> None:
    """Wake the relays. Never inside the writing transaction: commits would queue for one lock."""
    await connection.execute("SELECT pg_notify($1, '')", CHANNEL)
