"""The API keys of clients, each of a law firm or of none."""

import hashlib
import re
import secrets
from datetime import datetime

import asyncpg
import msgspec

from service.calculation_requests.conveyancers import UnknownConveyancer
from service.postgres.pool import Connection

_API_KEY = re.compile(r"cr_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", re.ASCII)


def looks_like_api_key(token: str) -> bool:
    """Whether *token* has the form of an API key, which no access token has."""
    return _API_KEY.fullmatch(token) is not None


def prefix_of(api_key: str) -> str:
    """Return the public part of an API key."""
    return api_key.split("_")[1]


async def create(connection: Connection, client: str, conveyancer_id: str | None = None) -> str:
    """Return a new API key, `cr_<prefix>_<secret>`. Only its hash is stored, so it cannot be shown again.

    With *conveyancer_id*, the key is refused while this firm is disabled. Raises UnknownConveyancer.
    """
    prefix = secrets.token_hex(6)
    api_key = f"cr_{prefix}_{secrets.token_urlsafe(32)}"
    try:
        await connection.execute(
            """
            INSERT INTO api_key (prefix, key_sha256, client, conveyancer_id)
            VALUES ($1, $2, $3, $4)
            """,
            prefix,
            _sha256(api_key),
            client,
            conveyancer_id,
        )
    except asyncpg.ForeignKeyViolationError:
        raise UnknownConveyancer from None
    return api_key


async def revoke(connection: Connection, prefix: str) -> bool:
    """Revoke the API key with this prefix. Returns False if no valid API key has it."""
    result = await connection.execute(
        "UPDATE api_key SET revoked_at = now() WHERE prefix = $1 AND revoked_at IS NULL", prefix
    )
    return result == "UPDATE 1"


class ApiKey(msgspec.Struct, frozen=True):
    """What is stored about an API key, except for its hash."""

    prefix: str
    client: str
    conveyancer_id: str | None
    created_at: datetime
    revoked_at: datetime | None


async def list_all(connection: Connection) -> list[ApiKey]:
    """Return every API key, revoked ones included, by client and age."""
    rows = await connection.fetch(
        """
        SELECT prefix, client, conveyancer_id, created_at, revoked_at
          FROM api_key
         ORDER BY client, created_at, prefix
        """
    )
    return [ApiKey(**row) for row in rows]


async def is_valid(connection: Connection, api_key: str) -> bool:
    """Whether the API key was issued and not revoked, and its firm, if any, may use the service."""
    found: bool = await connection.fetchval(
        """
        SELECT EXISTS (
            SELECT
              FROM api_key
             WHERE key_sha256 = $1
               AND revoked_at IS NULL
               AND (conveyancer_id IS NULL
                    OR conveyancer_id IN (SELECT id FROM active_conveyancer))
        )
        """,
        _sha256(api_key),
    )
    return found


def _sha256(api_key: str) -> bytes:
    return hashlib.sha256(api_key.encode()).digest()
