"""One API and one database for the tests of a module whose calls store nothing."""

from collections.abc import AsyncIterator

import asyncpg
import httpx
import msgspec
import pytest

from service.postgres.pool import Connection, Pool, open_pool
from service.settings import ServiceSettings
from tests.harness import databases
from tests.harness.in_process import api_client
from tests.harness.issuer import Issuer, api_settings
from tests.harness.tcp_proxy import TcpProxy


@pytest.fixture(scope="module")
async def shared_database_url(
    postgres_server: str, template: str, administrator: Connection
) -> AsyncIterator[str]:
    """URL of the module's database, in which no request is stored."""
    async with databases.copied(administrator, postgres_server, template) as url:
        yield url


@pytest.fixture(scope="module")
async def shared_database(shared_database_url: str) -> AsyncIterator[Connection]:
    """A connection to the module's database."""
    connection = await asyncpg.connect(shared_database_url)
    yield connection
    await connection.close()


@pytest.fixture(scope="module")
async def shared_client(shared_database_url: str, issuer: Issuer) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the module's API with a token of CONVEYANCER."""
    async with api_client(api_settings(shared_database_url, issuer), issuer.token()) as connected:
        yield connected


@pytest.fixture
async def pool(service_settings: ServiceSettings, link: TcpProxy) -> AsyncIterator[Pool]:
    """A pool of one connection, over `link`."""
    settings = msgspec.structs.replace(service_settings, database_url=link.url, database_pool_size=1)
    async with open_pool(settings) as opened:
        yield opened
