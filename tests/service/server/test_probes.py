"""Readiness, which decides whether a Service sends requests to the process."""

import asyncio
from uuid import uuid4

import httpx
import pytest
from yarl import URL

from deploy.local.machine.ports import accepts, free_port
from service.identifiers import uuid_of
from service.server import probes
from service.server.probes import Check
from tests.harness import databases
from tests.harness.http import bearer
from tests.harness.in_process import api_and_probes
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually


@pytest.fixture
async def role(database):
    """A Postgres user with the rights of the API."""
    name = f"reader_{uuid4().hex}"
    api = databases.user_of("api")
    await database.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'made-up' IN ROLE {api}")
    yield name
    await database.execute(f"DROP ROLE {name}")


async def test_api_becomes_unready_when_its_login_is_rejected(service_settings, database, role):
    url = str(URL(service_settings.database_url).with_user(role).with_password("made-up"))
    async with (
        TcpProxy(url) as link,
        api_and_probes(service_settings, None, database_url=link.url) as (client, prober),
    ):
        before = await prober.get("/readyz")
        await database.execute(f"ALTER ROLE {role} NOLOGIN")
        path = f"/v1/request/{uuid_of(uuid4())}"
        read = await asyncio.gather(*(client.get(path, headers=bearer("s" * 43)) for _ in range(8)))
        with_a_session = await prober.get("/readyz")
        metrics = (await prober.get("/metrics")).text
        await link.cut()
        rejected = await prober.get("/readyz")
        at_once = await prober.get("/readyz")  # during the pause between connection attempts
        await link.refuse()

        async def unreachable() -> httpx.Response | None:
            answer = await prober.get("/readyz")
            return None if "rejects the login" in answer.json()["postgres"] else answer

        then_unreachable = await eventually(unreachable)

    assert before.json() == {"postgres": "ok"}
    assert {answer.status_code for answer in read} == {401}
    assert with_a_session.status_code == 200, "a new password must not take every pod out at once"
    assert "rejects the login" in with_a_session.json()["postgres"]
    assert "postgres_login_rejected 1.0" in metrics
    assert (rejected.status_code, at_once.status_code) == (503, 503)
    assert "rejects the login" in rejected.json()["postgres"]
    assert then_unreachable.status_code == 503, "the login may still be rejected"


async def test_process_that_starts_or_stops_is_alive_and_measured_but_not_ready():
    checks: dict[str, Check] = {}
    port, stop = free_port(), asyncio.Event()

    async def statuses(*paths: str) -> list[int]:
        return [(await client.get(path)).status_code for path in paths]

    async def check() -> None:
        """Find nothing wrong."""

    async with (
        probes.serving(checks, ("127.0.0.1", port), stop),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        await eventually(lambda: accepts(port))
        starting = await statuses("/livez", "/readyz", "/nonsense")
        checks["nothing"] = check
        ready = await statuses("/readyz")
        stop.set()
        stopping = await statuses("/livez", "/metrics", "/readyz")

    assert starting == [200, 503, 404]
    assert ready == [200]
    assert stopping == [200, 200, 503]


async def test_process_is_not_ready_on_an_older_schema(service_settings, database):
    await database.execute("DELETE FROM schema_version")
    async with api_and_probes(service_settings, None) as (_, prober):
        response = await prober.get("/readyz")

    assert response.status_code == 503
    assert "schema apply" in response.json()["postgres"]
