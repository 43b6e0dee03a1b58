"""What operators see: readiness, which decides whether a Service sends requests, metrics, logs and traces."""

import asyncio
import json
import logging
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import structlog
from aiosmtplib import SMTPServerDisconnected
from msgspec.structs import replace
from structlog.testing import capture_logs
from yarl import URL

from deploy.local.machine.ports import accepts, free_port
from service.server import background, probes
from service.server.background import in_background
from service.server.probes import Check
from service.settings import Settings
from service.telemetry import logs, tracing
from tests.harness import databases
from tests.harness.examples import A_REQUEST
from tests.harness.http import bearer
from tests.harness.in_process import api_and_probes, restored_logging, served
from tests.harness.metrics import read, rises, series
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
        answers = await asyncio.gather(*(client.get(_NOT_THERE, headers=_MADE_UP) for _ in range(8)))
        with_a_session = await prober.get("/readyz")
        scraped = await prober.get("/metrics")  # without a token
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
    assert {answer.status_code for answer in answers} == {401}
    assert with_a_session.status_code == 200, "a new password must not take every pod out at once"
    assert scraped.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    exported = read(scraped.text)
    assert exported[series("postgres_login_rejected")] == 1.0
    assert exported[series("postgres_pool_connections", state="idle")] >= 1
    assert exported[series("postgres_pool_wait_seconds_count")] >= 1
    assert exported[series("postgres_pool_max_connections")] == service_settings.database_pool_size
    assert 0 <= exported[series("jwks_age_seconds")] < 60
    assert series("process_cpu_seconds_total") in exported
    assert (rejected.status_code, at_once.status_code) == (503, 503)
    for answer in (with_a_session, rejected):
        assert "rejects the login" in answer.json()["postgres"]
    assert then_unreachable.status_code == 503, "the login may still be rejected"


async def test_process_that_starts_or_stops_is_alive_and_measured_but_not_ready():
    checks: dict[str, Check] = {}
    port, stop = free_port(), asyncio.Event()

    async def statuses(*paths: str) -> list[int]:
        return [(await client.get(path)).status_code for path in paths]

    async with (
        probes.serving(checks, ("127.0.0.1", port), stop),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        await eventually(lambda: accepts(port))
        assert await statuses("/livez", "/readyz", "/nonsense") == [200, 503, 404]
        checks["nothing"] = partial(asyncio.sleep, 0)
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
        refused = await client.get(_NOT_THERE, headers=_MADE_UP)
        lost = [await prober.get("/readyz") for _ in range(2)]
        await database.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        headers = bearer(issuer.token())
        lost += [
            await client.post("/v1/request", json=A_REQUEST, headers=headers),
            await prober.get("/readyz"),
        ]

    assert [answer.status_code for answer in (older, before, unchanged, refused)] == [503, 200, 200, 401]
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
    with capture_logs() as lines, rises(counted, method=known, route=route, status=str(status)):
        response = await shared_client.request(method, path, json=A_REQUEST if method == "POST" else None)

    assert response.status_code == status
    assert [(line["method"], line["route"]) for line in served(lines)] == [(known, route)]


@pytest.fixture
def configure():
    """Configures logging as a process does."""
    with restored_logging():
        yield partial(logs.configure, Settings(database_url=""))


def written(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the lines written since the last call."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_lines_of_ours_and_of_libraries_have_one_format_and_do_not_quote_what_libraries_do(configure, capsys):
    configure()
    log = structlog.get_logger()
    log.debug("hidden")
    logging.getLogger("library").debug("hidden")
    log.warning("ours", odd=1j)
    logging.getLogger("library").warning("theirs %s", 2)

    ours, theirs = written(capsys)
    assert (ours["event"], ours["odd"], ours["level"]) == ("ours", "1j", "warning")
    assert (theirs["event"], theirs["level"]) == ("theirs 2", "warning")
    assert ours.keys() - {"odd"} == theirs.keys()

    logging.getLogger("httpx").info("hunter2")
    logging.getLogger("aiormq.channel").error("hunter2")
    logging.getLogger("asyncio").error("Task failed\ncontext: hunter2", exc_info=LookupError("hunter2"))

    [line] = written(capsys)
    assert (line["event"], line["level"], line["error"]) == ("Task failed", "error", "LookupError")
    assert "hunter2" not in str(line)
    ours = logs.describe(ConnectionRefusedError(111, "Connection refused"))
    theirs = logs.describe(SMTPServerDisconnected("<ada@customer.example.com>: go away"))
    assert (ours["reason"], theirs.get("reason")) == ("[Errno 111] Connection refused", None)


def test_line_that_cannot_be_written_does_not_stop_the_work(configure, monkeypatch):
    configure()
    with suppress(OSError), Path("/dev/full").open("w") as full:  # Closing it fails, too.
        monkeypatch.setattr(sys, "stdout", full)

        assert structlog.get_logger().error("lost") is None


def test_end_does_not_wait_until_the_export_to_a_silent_collector_gives_up(service_settings):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(10)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = replace(service_settings, otel_exporter_otlp_endpoint=endpoint)

        with tracing.exporting(settings, service="test"), tracing.span("a span", "client", dict):
            pass

        connection, _ = silent.accept()
        connection.settimeout(0)
        with connection, pytest.raises(BlockingIOError):  # The export has not given up.
            list(iter(partial(connection.recv, 65_536), b""))


@pytest.mark.parametrize("error", [LookupError, asyncio.CancelledError])  # aiormq cancels to close a channel
async def test_failed_work_is_logged_and_restarted_but_not_at_the_end(monkeypatch, error):
    monkeypatch.setattr(background, "_PAUSE_SECONDS", 0.01)
    begun = 0

    async def fail_twice_and_at_the_end() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise error("a secret")
        try:
            await asyncio.Event().wait()
        finally:
            raise LookupError

    with capture_logs() as lines, rises("background_failures_total", by=3, work="test"):
        async with asyncio.timeout(30), in_background("test", fail_twice_and_at_the_end):
            await eventually(lambda: begun == 3)

    names = [error.__name__, error.__name__, "LookupError"]
    failed = [("background_work_failed", "test", name) for name in names]
    assert [(line["event"], line["work"], line["error"]) for line in lines] == failed
    assert begun == 3
    assert "a secret" not in str(lines)
