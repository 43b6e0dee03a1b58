"""Databases on a server that may create them: with the schema, the conveyancers, or empty."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import asyncpg
from yarl import URL

from service.calculation_requests import conveyancers
from service.postgres import schema
from service.postgres.pool import Connection
from tests.harness.examples import CONVEYANCER, FREE_CONVEYANCER

ROLES = ("owner", "api", "worker", "operator", "scaling")

_copies = itertools.count(1)


async def create(administrator: Connection, name: str, *, template: str = "template1") -> None:
    """Create a database: an empty one, or a copy of *template*."""
    # Copying files is several times as fast as logging every page, where the files are in memory.
    await administrator.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY file_copy')


async def drop(administrator: Connection, name: str) -> None:
    await administrator.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@asynccontextmanager
async def copied(administrator: Connection, server_url: str, template: str) -> AsyncIterator[str]:
    name = f"{template}_{next(_copies)}"
    await create(administrator, name, template=template)
    await administrator.execute(f'ALTER DATABASE "{name}" OWNER TO {user_of("owner")}')
    yield url_of(server_url, name)
    await drop(administrator, name)


def url_of(server_url: str, name: str) -> str:
    return str(URL(server_url).with_path(f"/{name}", keep_query=True))


def user_of(role: str) -> str:
    return f"calculation_requests_{role}"


def as_role(url: str, role: str) -> str:
    """Return the URL with which a role, such as api, connects to the database of *url*."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{user_of(role)}:made-up@{parts.netloc.rpartition('@')[2]}").geturl()


async def prepare(connection: Connection) -> None:
    """Apply the schema as its owner. Add a conveyancer who charges a calculation fee and one who does not.

    The connection is a superuser's. If the server has no roles for the service yet, they are created.
    """
    for role in ROLES:
        if not await connection.fetchval("SELECT to_regrole($1)", user_of(role)):
            await connection.execute(f"CREATE ROLE {user_of(role)} LOGIN PASSWORD 'made-up'")
    name = await connection.fetchval("SELECT current_database()")
    await connection.execute(f'ALTER DATABASE "{name}" OWNER TO {user_of("owner")}')
    await connection.execute(f"SET SESSION AUTHORIZATION {user_of('owner')}")
    await schema.apply(connection)
    await connection.execute("RESET SESSION AUTHORIZATION")
    await conveyancers.register(connection, CONVEYANCER, name="Acme", charges_calculation_fee=True)
    await conveyancers.register(connection, FREE_CONVEYANCER, name="Free", charges_calculation_fee=False)


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(url, **options)
    try:
        yield connection
    finally:
        await connection.close()


def failing_for_all_roles(table: str) -> str:
    """Return SQL after which every statement of our roles on *table* fails, as by a fault of our own."""
    return f"CREATE POLICY fault ON {table} USING (1 / 0 = 1); ALTER TABLE {table} ENABLE ROW LEVEL SECURITY"


async def has_waiting_statement(database: Connection) -> bool:
    return await count_waiting_statements(database) > 0


async def count_waiting_statements(database: Connection) -> int:
    """Return how many statements wait for the lock of another transaction."""
    return await database.fetchval(
        """
        SELECT count(*)
          FROM pg_locks
         WHERE NOT granted
           AND (database IS NULL
                OR database = (SELECT oid FROM pg_database WHERE datname = current_database()))
        """
    )


async def is_gone(database: Connection, process: int) -> bool:
    return not await database.fetchval("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", process)
