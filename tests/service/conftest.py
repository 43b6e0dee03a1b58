"""One API and one database for the tests of a module whose calls store nothing."""

import msgspec
import pytest

from service.api.openapi.examples import FULL_REQUEST
from service.calculation_requests import erasing
from service.postgres.pool import Connection, open_pool
from tests.harness import databases
from tests.harness.in_process import api_client
from tests.harness.issuer import api_settings


async def erase_all(database: Connection) -> None:
    """Erase every request."""
    stored = await database.fetch("SELECT id FROM calculation_request")
    async with database.transaction():
        await erasing.erase(database, [request_id for (request_id,) in stored])


@pytest.fixture(scope="module")
async def shared_client(postgres_server, template, administrator, issuer):
    """A client of the module's API with a token of CONVEYANCER."""
    async with (
        databases.copied(administrator, postgres_server, template) as url,
        api_client(api_settings(databases.as_role(url, "api"), issuer), issuer.token()) as connected,
    ):
        yield connected


@pytest.fixture
async def created(client):
    """A request that has everything, as CONVEYANCER sees it."""
    return (await client.post("/v1/request", json=FULL_REQUEST)).json()["data"]


@pytest.fixture
async def pool(service_settings, link):
    """A pool of one connection, over `link`."""
    settings = msgspec.structs.replace(service_settings, database_url=link.url, database_pool_size=1)
    async with open_pool(settings) as opened:
        yield opened
