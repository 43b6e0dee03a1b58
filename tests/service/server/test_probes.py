"""The probes: readiness, which decides whether a Service sends requests to the process, and metrics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import httpx
import msgspec
import pytest
from yarl import URL

from service.identifiers import uuid_of
from service.server import probes
from service.server.http_server import listen
from service.server.probes import Checks, NotReady
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_client
from tests.harness.metrics import rises
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually


@pytest.fixture
async def role(database):
    """A Postgres user that may read the schema version, and requests."""
    name = f"reader_{uuid4().hex}"
    await database.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'made-up'")
    await database.execute(f"GRANT SELECT ON schema_version, calculation_request TO {name}")
    yield name
    await database.execute(f"DROP OWNED BY {name}")
    await database.execute(f"DROP ROLE {name}")


async def test_api_stays_ready_when_postgres_becomes_unreachable_and_reports_it(
    service_settings, issuer, link
):
    """Otherwise no API would be left in the Service, and callers would get the answer of the ingress."""
    async with api_client(service_settings, issuer.token(), database_url=link.url) as distant:

        async def reports_postgres_ok() -> bool:
            return bool((await distant.get("/readyz")).json() == {"postgres": "ok"})

        assert await reports_postgres_ok()
        await link.refuse()
        with rises("postgres_unavailable_total"):
            unreachable = await distant.get("/readyz")
        created = await distant.post("/v1/request", json=A_REQUEST)
        link.admit()
        await eventually(reports_postgres_ok)

    assert unreachable.status_code == 200
    assert "Postgres is unreachable" in unreachable.json()["postgres"]
    assert created.status_code == 503
    assert created.json()["errors"][0]["code"] == "unavailable"


async def test_api_becomes_unready_when_its_login_is_rejected(service_settings, database, role):
    url = str(URL(service_settings.database_url).with_user(role).with_password("made-up"))
    async with (
        TcpProxy(url) as link,
        api_client(msgspec.structs.replace(service_settings, database_url=link.url), None) as client,
    ):
        before = await client.get("/readyz")
        await database.execute(f"ALTER ROLE {role} NOLOGIN")
        await asyncio.gather(*(_read_with_made_up_secret(client) for _ in range(8)))
        with_a_session = await client.get("/readyz")
        metrics = (await client.get("/metrics")).text
        await link.cut()
        rejected = await client.get("/readyz")
        at_once = await client.get("/readyz")  # during the pause between connection attempts

    assert before.json() == {"postgres": "ok"}
    assert with_a_session.status_code == 200, "a new password must not take every pod out at once"
    assert "rejects the login" in with_a_session.json()["postgres"]
    assert "postgres_login_rejected 1.0" in metrics
    assert (rejected.status_code, at_once.status_code) == (503, 503)
    assert "rejects the login" in rejected.json()["postgres"]


async def _read_with_made_up_secret(client: httpx.AsyncClient) -> None:
    headers = {"Authorization": f"Bearer {'s' * 43}"}
    answer = await client.get(f"/v1/request/{uuid_of(uuid4())}", headers=headers)
    assert answer.status_code == 401


@asynccontextmanager
async def probes_alone(checks: Checks) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the probes of a process without an API."""
    stop = asyncio.Event()
    with listen("127.0.0.1", 0) as listening:
        serving = asyncio.create_task(probes.serve(checks, None, listening, stop))
        base_url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=base_url, timeout=20.0) as client:
            yield client
        stop.set()
        await serving


async def test_readiness_names_the_state_of_every_check():
    async def passing() -> None:
        pass

    async def failing() -> None:
        raise NotReady("No broker.")

    async with probes_alone({"one": passing, "two": failing, "three": passing}) as client:
        response = await client.get("/readyz")

    assert response.status_code == 503
    assert response.json() == {"one": "ok", "two": "No broker.", "three": "ok"}


async def test_process_without_an_api_serves_the_probes_and_nothing_else():
    async with probes_alone({}) as client:
        paths = ("/livez", "/readyz", "/metrics", "/nonsense", "//metrics")
        statuses = [(await client.get(client.base_url.copy_with(path=path))).status_code for path in paths]

    assert statuses == [200, 200, 200, 404, 404]
