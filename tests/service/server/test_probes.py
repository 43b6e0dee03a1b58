"""Readiness: what takes a process out of its Service, and what does not."""

from collections.abc import AsyncIterator
from uuid import uuid4

import httpx
import msgspec
import pytest
from yarl import URL

from service.postgres.pool import Connection
from service.settings import ServiceSettings
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_client
from tests.harness.issuer import Issuer
from tests.harness.metrics import rises
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually


@pytest.fixture
async def link(service_settings: ServiceSettings) -> AsyncIterator[TcpProxy]:
    """The network between the API and Postgres."""
    async with TcpProxy(service_settings.database_url) as forwarder:
        yield forwarder


@pytest.fixture
async def distant(
    service_settings: ServiceSettings, issuer: Issuer, link: TcpProxy
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an API with that network."""
    settings = msgspec.structs.replace(service_settings, database_url=link.url)
    async with api_client(settings, issuer.token()) as connected:
        yield connected


@pytest.fixture
async def role(database: Connection) -> AsyncIterator[str]:
    """A user of Postgres who may look at the version of the schema."""
    name = f"reader_{uuid4().hex}"
    await database.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'made-up'")
    await database.execute(f"GRANT SELECT ON schema_version TO {name}")
    yield name
    await database.execute(f"DROP OWNED BY {name}")
    await database.execute(f"DROP ROLE {name}")


async def says_that_all_is_well(client: httpx.AsyncClient) -> bool:
    return bool((await client.get("/readyz")).json() == {"postgres": "ok"})


async def test_api_that_has_seen_postgres_stays_ready_without_it_and_says_that_it_is_away(
    distant: httpx.AsyncClient, link: TcpProxy
) -> None:
    """Else no API were left in the Service, and callers got the answer of the ingress in place of ours."""
    before = await distant.get("/readyz")
    await link.refuse()
    with rises("postgres_unavailable_total"):
        away = await distant.get("/readyz")
    created = await distant.post("/v1/request", json=A_REQUEST)
    link.admit()
    await eventually(lambda: says_that_all_is_well(distant))

    assert before.json() == {"postgres": "ok"}
    assert away.status_code == 200
    assert "did not answer" in away.json()["postgres"]
    assert created.status_code == 503
    assert created.json()["errors"][0]["code"] == "unavailable"


async def test_api_that_has_not_seen_postgres_is_not_ready(
    distant: httpx.AsyncClient, link: TcpProxy
) -> None:
    await link.refuse()

    assert (await distant.get("/readyz")).status_code == 503


async def test_api_whose_login_is_refused_is_not_ready_though_it_was(
    service_settings: ServiceSettings, database: Connection, role: str
) -> None:
    url = str(URL(service_settings.database_url).with_user(role).with_password("made-up"))
    async with (
        TcpProxy(url) as link,
        api_client(msgspec.structs.replace(service_settings, database_url=link.url), None) as client,
    ):
        before = await client.get("/readyz")
        await database.execute(f"ALTER ROLE {role} NOLOGIN")
        await link.cut()
        refused = await client.get("/readyz")
        at_once = await client.get("/readyz")  # while Postgres is left alone

    assert before.status_code == 200
    assert (refused.status_code, at_once.status_code) == (503, 503)
    assert "refuses the login" in refused.json()["postgres"]


async def test_api_is_not_ready_when_the_schema_became_older_than_it_needs(
    client: httpx.AsyncClient, database: Connection
) -> None:
    before = await client.get("/readyz")
    await database.execute("DELETE FROM schema_version")

    assert before.status_code == 200
    assert (await client.get("/readyz")).status_code == 503
