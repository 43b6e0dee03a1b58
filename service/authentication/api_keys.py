"""The API keys of law firms, and the time of their last use."""

import asyncio
import hashlib
import re
import secrets
from contextlib import suppress
from datetime import datetime

import asyncpg
import msgspec

from service.calculation_requests.conveyancers import UnknownConveyancer
from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool

_WRITE_SECONDS = 60.0  # between writes of the times when keys were last used
_API_KEY = re.compile(r"cr_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", re.ASCII)


def looks_like_api_key(token: str) -> bool:
    """Whether *token* has the form of an API key, which no access token has."""
    return _API_KEY.fullmatch(token) is not None


async def create(connection: Connection, conveyancer_id: str) -> str:
    """Return a new API key, `cr_<prefix>_<secret>`. Only its hash is stored, so it cannot be shown again."""
    prefix = secrets.token_hex(6)
    api_key = f"cr_{prefix}_{secrets.token_urlsafe(32)}"
    try:
        await connection.execute(
            """
            INSERT INTO api_key (prefix, key_sha256, conveyancer_id)
            VALUES ($1, $2, $3)
            """,
            prefix,
            _sha256(api_key),
            conveyancer_id,
        )
    except asyncpg.ForeignKeyViolationError:
        raise UnknownConveyancer from None
    return api_key


async def revoke(connection: Connection, prefix: str) -> bool:
    """Revoke the API key with this prefix. Returns False when no valid one has it."""
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
    """What is stored about an API key, except for its hash."""

    prefix: str
    conveyancer_id: str
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


async def list_all(connection: Connection) -> list[ApiKey]:
    """Return every API key, revoked ones included, by conveyancer and age."""
    rows = await connection.fetch(
        """
        SELECT prefix, conveyancer_id, created_at, last_used_at, revoked_at
          FROM api_key
         ORDER BY conveyancer_id, created_at, prefix
        """
    )
    return [ApiKey(**row) for row in rows]


class ApiKeys:
    """Accepts valid API keys, and writes at intervals which were used, so no caller waits for that.

    A crash loses the uses since the last write. Nothing depends on them.
    """

    def __init__(self, pool: Pool, *, timeout_seconds: float) -> None:
        self._pool = pool
        self._timeout_seconds = timeout_seconds
        self._used: set[str] = set()  # prefixes

    async def accept(self, api_key: str) -> bool:
        """Whether an API key is valid. Raises PostgresUnavailable."""
        async with loans.connection(self._pool, seconds=self._timeout_seconds) as connection:
            prefix: str | None = await connection.fetchval(
                """
                SELECT prefix
                  FROM api_key
                  JOIN active_conveyancer AS conveyancer
                    ON conveyancer.id = api_key.conveyancer_id
                 WHERE key_sha256 = $1
                   AND revoked_at IS NULL
                """,
                _sha256(api_key),
            )
        if prefix is not None:
            self._used.add(prefix)
        return prefix is not None

    async def run(self) -> None:
        """Write at each interval, and once more when cancelled."""
        try:
            while True:
                await asyncio.sleep(_WRITE_SECONDS)
                await self._write()
        finally:
            await self._write()

    async def _write(self) -> None:
        """Write all uses, each at most once in five minutes. They are kept while Postgres is unavailable."""
        used = frozenset(self._used)
        if not used:
            return
        with suppress(PostgresUnavailable):
            async with loans.connection(self._pool, seconds=self._timeout_seconds) as connection:
                await connection.execute(
                    """
                    UPDATE api_key
                       SET last_used_at = now()
                     WHERE prefix = ANY ($1)
                       AND (last_used_at IS NULL OR last_used_at < now() - interval '5 minutes')
                    """,
                    list(used),
                )
            self._used -= used


def _sha256(api_key: str) -> bytes:
    return hashlib.sha256(api_key.encode()).digest()
