"""Readiness, which decides whether a Service sends requests to the process, and the metrics of the API."""

import asyncio
from uuid import uuid4

import httpx
import pytest
from structlog.testing import capture_logs
from yarl import URL

from deploy.local.machine.ports import accepts, free_port
from service.server import probes
from service.server.probes import Check
from tests.harness import databases
from tests.harness.examples import A_REQUEST
from tests.harness.http import bearer
from tests.harness.in_process import api_and_probes, served
from tests.harness.metrics import rises, scrape, series
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually

_NOT_THERE = "/v1/request/req_0000000000000000000000"
_MADE_UP = bearer("s" * 43)


async def test_api_becomes_unready_when_its_login_is_rejected(service_settings, database):
    role = f"reader_{uuid4().hex}"
    await database.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'made-up' IN ROLE {databases.user_of('api')}")
    url = str(URL(service_settings.database_url).with_user(role).with_password("made-up"))
    async with (
        TcpProxy(url) as link,
        api_and_probes(service_settings, None, database_url=link.url) as (client, prober),
    ):
        before = await prober.get("/readyz")
        await database.execute(f"ALTER ROLE {role} NOLOGIN")
        read = await asyncio.gather(*(client.get(_NOT_THERE, headers=_MADE_UP) for _ in range(8)))
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
    await database.execute(f"DROP ROLE {role}")

    assert before.json() == {"postgres": "ok"}
    assert {answer.status_code for answer in read} == {401}
    assert with_a_session.status_code == 200, "a new password must not take every pod out at once"
    assert "postgres_login_rejected 1.0" in metrics
    assert (rejected.status_code, at_once.status_code) == (503, 503)
    for answer in (with_a_session, rejected):
        assert "rejects the login" in answer.json()["postgres"]
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
        assert await statuses("/livez", "/readyz", "/nonsense") == [200, 503, 404]
        checks["nothing"] = check
        assert await statuses("/readyz") == [200]
        stop.set()
        assert await statuses("/livez", "/metrics", "/readyz") == [200, 200, 503]


async def test_schema_is_looked_at_first_and_after_a_reconnect(service_settings, issuer, database, link):
    """Postgres may have lost its data, as a development cluster's does when its pod ends."""
    await database.execute("CREATE TABLE kept AS TABLE schema_version; DELETE FROM schema_version")
    changes = {"database_url": link.url, "database_pool_size": 1}
    async with api_and_probes(service_settings, None, **changes) as (client, prober):
        older = await prober.get("/readyz")
        await database.execute("INSERT INTO schema_version SELECT * FROM kept")
        before = await prober.get("/readyz")
        await database.execute("DROP TABLE schema_version")
        unchanged = await prober.get("/readyz")
        await link.cut()
        read = await client.get(_NOT_THERE, headers=_MADE_UP)
        lost = [await prober.get("/readyz") for _ in range(2)]
        await database.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        headers = bearer(issuer.token())
        lost += [
            await client.post("/v1/request", json=A_REQUEST, headers=headers),
            await prober.get("/readyz"),
        ]

    assert [answer.status_code for answer in (older, before, unchanged, read)] == [503, 200, 200, 401]
    assert [answer.status_code for answer in lost] == [503] * 4
    for answer in (older, lost[0]):
        assert "schema apply" in answer.json()["postgres"]


@pytest.mark.parametrize(
    ("method", "path", "route", "status"),
    [
        ("POST", "/v1/request", "/v1/request", 200),
        ("GET", _NOT_THERE, "/v1/request/{uuid}", 404),
        ("GET", "/v1/nothing/ada@example.com?secret=s", "unmatched", 404),
        ("PURGE", "/v1/nothing", "unmatched", 404),
    ],
)
async def test_requests_are_counted_by_template_and_status(shared_client, method, path, route, status):
    known, counted = method if method != "PURGE" else "other", "http_request_duration_seconds_count"
    with capture_logs() as logs, rises(counted, method=known, route=route, status=str(status)):
        response = await shared_client.request(method, path, json=A_REQUEST if method == "POST" else None)

    assert response.status_code == status
    assert [(line["method"], line["route"]) for line in served(logs)] == [(known, route)]


async def test_pool_and_keys_are_measured_and_metrics_need_no_token(service_settings, issuer):
    async with api_and_probes(service_settings, issuer.token()) as (client, prober):
        await client.get(_NOT_THERE)
        exported = await scrape(prober)

    assert exported[series("postgres_pool_connections", state="idle")] >= 1
    assert exported[series("postgres_pool_wait_seconds_count")] >= 1
    assert exported[series("postgres_pool_max_connections")] == service_settings.database_pool_size
    assert 0 <= exported[series("jwks_age_seconds")] < 60
    assert series("process_cpu_seconds_total") in exported
