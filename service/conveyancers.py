"""The law firms that use the service: their accounts, whether they charge a fee, their API keys."""

import hashlib
import re
import secrets
from collections.abc import Collection
from datetime import datetime

import asyncpg
import msgspec

from service.postgres import Connection

_API_KEY = re.compile(r"cr_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", re.ASCII)


class UnknownConveyancer(Exception):
    """No conveyancer is registered under this identifier."""


async def add(
    connection: Connection, conveyancer_id: str, *, name: str, charges_calculation_fee: bool
) -> None:
    """Register a conveyancer, or change the name and fee setting of a registered one."""
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
    """Whether this conveyancer charges a calculation fee, which alone makes a waiver mean something."""
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


def looks_like_api_key(token: str) -> bool:
    """Whether *token* has the form of our API keys, so that it cannot be an access token."""
    return _API_KEY.fullmatch(token) is not None


async def create_api_key(connection: Connection, conveyancer_id: str) -> str:
    """Return a new API key, `cr_<prefix>_<secret>`. It cannot be shown again: only its hash is stored."""
    prefix = secrets.token_hex(6)
    key = f"cr_{prefix}_{secrets.token_urlsafe(32)}"
    try:
        await connection.execute(
            """
            INSERT INTO api_key (prefix, key_sha256, conveyancer_id)
            VALUES ($1, $2, $3)
            """,
            prefix,
            _sha256(key),
            conveyancer_id,
        )
    except asyncpg.ForeignKeyViolationError:
        raise UnknownConveyancer from None
    return key


async def revoke_api_key(connection: Connection, prefix: str) -> bool:
    """Revoke the key with this prefix. False when there is none that is still valid."""
    result = await connection.fetchval(
        """
        UPDATE api_key
           SET revoked_at = now()
         WHERE prefix = $1
           AND revoked_at IS NULL
        RETURNING prefix
        """,
        prefix,
    )
    return result is not None


class ApiKey(msgspec.Struct, frozen=True):
    """What is known of an API key; the key itself is not."""

    prefix: str
    conveyancer_id: str
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


async def list_api_keys(connection: Connection) -> list[ApiKey]:
    """Return every API key, the revoked ones included, by conveyancer and age."""
    rows = await connection.fetch(
        """
        SELECT prefix, conveyancer_id, created_at, last_used_at, revoked_at
          FROM api_key
         ORDER BY conveyancer_id, created_at, prefix
        """
    )
    return [ApiKey(**row) for row in rows]


async def find_api_key(connection: Connection, key: str) -> str | None:
    """Return the prefix of this API key, or None when it is not valid."""
    prefix: str | None = await connection.fetchval(
        """
        SELECT prefix
          FROM api_key
         WHERE key_sha256 = $1
           AND revoked_at IS NULL
        """,
        _sha256(key),
    )
    return prefix


async def record_api_key_uses(connection: Connection, prefixes: Collection[str]) -> None:
    """Record that the keys with these prefixes have just been used, at most once in five minutes each."""
    await connection.execute(
        """
        UPDATE api_key
           SET last_used_at = now()
         WHERE prefix = ANY ($1)
           AND (last_used_at IS NULL OR last_used_at < now() - interval '5 minutes')
        """,
        list(prefixes),
    )


def _sha256(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
