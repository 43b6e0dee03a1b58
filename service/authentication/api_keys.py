"""The API keys of clients, which open only the questionnaire."""

import hashlib
import re
import secrets

import asyncpg

from service.postgres.pool import Connection

_API_KEY = re.compile(r"cr_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", re.ASCII)


def looks_like_api_key(token: str) -> bool:
    """Whether *token* has the form of an API key, which no access token has."""
    return _API_KEY.fullmatch(token) is not None


async def create(connection: Connection, client: str) -> str:
    """Return a new API key, `cr_<prefix>_<secret>`. Only its hash is stored, so it cannot be shown again."""
    prefix = secrets.token_hex(6)
    api_key = f"cr_{prefix}_{secrets.token_urlsafe(32)}"
    await connection.execute(
        "INSERT INTO api_key (prefix, key_sha256, client) VALUES ($1, $2, $3)",
        prefix,
        _sha256(api_key),
        client,
    )
    return api_key


async def revoke(connection: Connection, prefix: str) -> bool:
    """Revoke the API key with this prefix. Returns False if no valid API key has it."""
    result = await connection.execute(
        "UPDATE api_key SET revoked_at = now() WHERE prefix = $1 AND revoked_at IS NULL", prefix
    )
    return result == "UPDATE 1"


async def list_all(connection: Connection) -> list[asyncpg.Record]:
    """Return what is stored about every API key, even a revoked one, except its hash, by client and age."""
    return await connection.fetch(
        "SELECT prefix, client, created_at, revoked_at FROM api_key ORDER BY client, created_at, prefix"
    )


async def is_valid(connection: Connection, api_key: str) -> bool:
    """Whether the API key was issued and not revoked."""
    found: bool = await connection.fetchval(
        "SELECT EXISTS (SELECT FROM api_key WHERE key_sha256 = $1 AND revoked_at IS NULL)", _sha256(api_key)
    )
    return found


def _sha256(api_key: str) -> bytes:
    return hashlib.sha256(api_key.encode()).digest()
