"""With Debian's nginx in front: no call fails in a restart, and slow or odd callers end at the gateway."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.local.machine import packages
from deploy.local.machine.ports import accepts, free_port
from tests.end_to_end.callers import another_request, answer_more, client_of
from tests.harness.examples import A_REQUEST
from tests.harness.processes import Process, bare_environment, started
from tests.harness.raw_connection import connect_to, head_with
from tests.harness.waiting import eventually

_BODY = json.dumps(A_REQUEST).encode()
_BUNDLE = b"GET /schema/rapidoc-min.js HTTP/1.1\r\nHost: api\r\n\r\n"
_SLOW_READERS = 200

pytestmark = pytest.mark.long


@pytest.fixture
async def gateway(apis: list[Process], tmp_path: Path) -> AsyncIterator[Process]:
    """The gateway in front of both, as processes that run."""
    port = free_port()
    temporary = "\n".join(
        f"{name}_temp_path {tmp_path}/{name};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    configuration = tmp_path / "nginx.conf"
    configuration.write_text(f"""
        daemon off;
        pid {tmp_path}/nginx.pid;
        {"user root;" if os.getuid() == 0 else ""}
        events {{ worker_connections 2000; }}
        http {{
            access_log off;
            client_header_timeout 2s;
            {temporary}
            upstream api {{
                {" ".join(f"server 127.0.0.1:{api.port} max_fails=0;" for api in apis)}
                keepalive 32;
            }}
            server {{
                listen 127.0.0.1:{port};
                location / {{
                    proxy_pass http://api;
                    proxy_http_version 1.1;
                    proxy_set_header Host $host;
                    proxy_set_header Connection "";
                }}
            }}
        }}
    """)
    program = packages.command("nginx", package="nginx")
    command = [*program, "-e", "stderr", "-p", str(tmp_path), "-c", str(configuration)]
    nginx = Process("nginx", command, environment=bare_environment(), port=port, folder=tmp_path)
    async with started(*apis), started(nginx, ready=False):
        await eventually(lambda: accepts(port))
        yield nginx


async def test_restart_of_each_process_under_load_fails_no_call(apis, gateway, issuer):
    statuses: list[int] = []

    async def call() -> None:
        async with client_of(gateway, issuer.token()) as caller:
            while not is_over.is_set():
                answers = [
                    await caller.post("/v1/request", json=another_request()),
                    await caller.get("/v1/request"),
                ]
                statuses.extend(answer.status_code for answer in answers)

    is_over = asyncio.Event()
    async with asyncio.TaskGroup() as callers:
        for _ in range(8):
            callers.create_task(call())
        for api in apis:
            await answer_more(statuses, 100)
            assert await api.stop() == 0
            api.start()
            await api.becomes_ready()
        is_over.set()

    assert len(statuses) > 200
    assert set(statuses) == {200}


async def test_slow_callers_cost_the_api_nothing(apis, gateway, issuer):
    before = max(api.rss_megabytes() for api in apis)
    slow = [await connect_to(gateway.base_url) for _ in range(_SLOW_READERS)]
    for connection in slow:
        connection.send(_BUNDLE * 5)
    half_sent = [await connect_to(gateway.base_url) for _ in range(50)]
    for connection in half_sent:
        connection.send(head_with(issuer.token(), line="GET /v1/request HTTP/1.1")[:-2])
    async with client_of(gateway, issuer.token()) as caller:
        for _ in range(20):
            assert (await caller.post("/v1/request", json=another_request())).status_code == 200
    assert [await connection.rest() for connection in half_sent] == [b""] * 50

    assert max(api.rss_megabytes() for api in apis) < before + 60
    for connection in slow:
        connection.hang_up()


async def test_odd_requests_are_served_or_refused(gateway, issuer):
    offer = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ"]
    create = head_with(issuer.token(), f"Content-Length: {len(_BODY)}", *offer) + _BODY
    connection = await connect_to(gateway.base_url)
    connection.send(create * 20)
    assert {(await connection.answer()).status for _ in range(20)} == {200}

    for header, statuses in (("Host: other", {400}), ("Transfer-Encoding: gzip, chunked", {400, 501})):
        connection = await connect_to(gateway.base_url)
        connection.send(head_with(issuer.token(), header))
        assert (await connection.answer()).status in statuses
