"""Errors of the server itself: each has the envelope and X-Request-Id, and one line in the log."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from http import HTTPStatus
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from service.api import json_body
from service.api.errors import ApiError
from service.api.outer_layer import OuterLayer
from service.identifiers import new_request_id, uuid_of
from service.server import probes
from service.server.asgi import Receive, Response, Scope, Send
from service.server.limits import LARGEST_BODY, LONGEST_PATH
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER
from tests.harness.in_process import api_client, serve, served
from tests.harness.metrics import rises
from tests.harness.waiting import eventually

REQUEST_ID = "case-17.a_B"
STRUCTURE = "/v1/questionnaire/structure"
JSON = {"Content-Type": "application/json"}
NO_BODY = {204, 304}


@pytest.fixture
async def hurried(service_settings, issuer):
    """A client of an API that gives Postgres little time."""
    async with api_client(service_settings, issuer.token(), database_timeout_seconds=0.2) as connected:
        yield connected


async def test_every_answer_carries_the_request_id_and_so_does_its_one_log_line(
    client, hurried, issuer, database
):
    etag = (await client.get(STRUCTURE)).headers["ETag"]
    unscoped = {"Authorization": f"Bearer {issuer.token(scope='')}"}
    a_path = f"/v1/request/{uuid_of(new_request_id())}"
    await database.execute(
        "ALTER TABLE calculation_request ADD CHECK (case_ref <> 'impossible'), "
        "ADD CHECK (case_ref <> 'away' OR pg_sleep(3) IS NULL)"
    )
    calls: dict[int, tuple[str, str, dict[str, Any]]] = {
        200: ("POST", "/v1/request", {"json": A_REQUEST}),
        204: ("OPTIONS", "/v1/request", {}),
        304: ("GET", STRUCTURE, {"headers": {"If-None-Match": etag}}),
        400: ("POST", "/v1/request", {"content": b"{", "headers": JSON}),
        401: ("GET", a_path, {"headers": {"Authorization": "Basic YTpi"}}),
        403: ("GET", a_path, {"headers": unscoped}),
        404: ("GET", "/nonsense", {}),
        405: ("DELETE", a_path, {}),
        413: ("POST", "/v1/request", {"json": {"notes": "x" * LARGEST_BODY}}),
        415: ("POST", "/v1/request", {"content": b"{}", "headers": {"Content-Type": "text/plain"}}),
        422: ("POST", "/v1/request", {"json": {}}),
        500: ("POST", "/v1/request", {"json": A_REQUEST | {"case_ref": "impossible"}}),
        503: ("POST", "/v1/request", {"json": A_REQUEST | {"case_ref": "away"}}),
    }

    for expected, (method, path, options) in calls.items():
        with capture_logs() as logs:
            response = await (hurried if expected == 503 else client).request(
                method,
                path,
                **options | {"headers": {**options.get("headers", {}), "X-Request-Id": REQUEST_ID}},
            )
            await eventually(partial(served, logs))

        assert response.status_code == expected
        assert response.headers.get_list("X-Request-Id") == [REQUEST_ID], expected
        assert [line["status"] for line in served(logs)] == [expected]
        assert ("Retry-After" in response.headers) == (expected == 503)
        if expected in NO_BODY:
            assert response.content == b""
        else:
            assert response.json()["status"]["code"] == expected
            assert (response.json()["errors"] is None) == (expected == 200)


@pytest.mark.parametrize("path", ["/livez", "/readyz", STRUCTURE, "/nonsense", "/v1/request/nonsense"])
async def test_head_is_get_without_its_body(shared_client, path):
    expected = await shared_client.get(path)
    with capture_logs() as logs:
        response = await shared_client.head(path)
        await eventually(lambda: served(logs))

    assert response.content == b""
    assert response.status_code == expected.status_code
    varying = {"x-request-id", "date"}
    assert {name: value for name, value in response.headers.items() if name not in varying} == {
        name: value for name, value in expected.headers.items() if name not in varying
    }
    assert served(logs)[0]["method"] == "HEAD"


async def test_options_and_405_list_the_methods(shared_client):
    for path in (STRUCTURE, f"/v1/request/{uuid_of(new_request_id())}", *probes.PATHS):
        asked = await shared_client.options(path)
        refused = await shared_client.delete(path)

        assert (asked.status_code, asked.content) == (204, b"")
        assert (refused.status_code, refused.json()["errors"][0]["code"]) == (405, "method_not_allowed")
        for response in (asked, refused):
            assert set(response.headers["Allow"].split(", ")) == {"GET", "HEAD", "OPTIONS"}


async def test_router_gets_no_long_path(shared_client):
    """It remembers a thousand paths of any length."""
    routed = []

    async def router(scope: Scope, receive: Receive, send: Send) -> None:
        routed.append(scope["path"])
        await Response.of(HTTPStatus.OK, b"text/plain", b"")(scope, receive, send)

    ours = [f"/v1/request/{uuid_of(new_request_id())}/events", "/" + "x" * (LONGEST_PATH - 1)]
    async with serve(OuterLayer(router)) as base_url, httpx.AsyncClient(base_url=base_url) as client:
        answers = [await client.get(path) for path in (*ours, "/" + "x" * LONGEST_PATH, "/" + "x" * 60_000)]

    assert [answer.status_code for answer in answers] == [200, 200, 404, 404]
    assert routed == ours
    assert (await shared_client.get("/" + "x" * 60_000)).json()["errors"][0]["code"] == "not_found"


async def test_too_large_body_is_refused_with_its_size_if_it_is_known(shared_client):
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(257):
            yield b" " * 1024

    announced = await shared_client.post("/v1/request", content=b" " * 262_145, headers=JSON)
    streamed = await shared_client.post("/v1/request", content=chunks(), headers=JSON)

    assert [response.json()["errors"][0]["message"] for response in (announced, streamed)] == [
        "The body has 262145 bytes: at most 262144 (256 KiB) are accepted.",
        "The body is larger than 256 KiB: send less.",
    ]


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP", "identity, gzip"])
def test_compressed_body_is_refused_by_its_header(encoding):
    with pytest.raises(ApiError, match="Content-Encoding"):
        json_body.check_declared("application/json", encoding)
    json_body.check_declared("application/json", "Identity")


async def fill_half(client: httpx.AsyncClient) -> list[asyncio.Task[httpx.Response]]:
    """Read from a process with one connection until one call is refused, as 16 others of the firm wait."""
    calls = [asyncio.create_task(client.get("/v1/request")) for _ in range(18)]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    return calls


async def test_busy_process_sheds_the_load_of_one_firm_at_once_serves_others_and_stays_ready(
    service_settings, issuer, database
):
    """One firm takes half of the queue."""
    other_firm = {"Authorization": f"Bearer {issuer.token(FREE_CONVEYANCER)}"}
    async with api_client(
        service_settings, issuer.token(), database_pool_size=1, database_timeout_seconds=20.0
    ) as client:
        await client.get("/readyz")
        await database.execute("BEGIN; LOCK TABLE calculation_request")
        waiting = await fill_half(client)
        with (
            rises("postgres_unavailable_total"),
            rises("http_request_duration_seconds_count", method="GET", route="/v1/request", status="503"),
        ):
            refused = await client.get("/v1/request", headers={"X-Request-Id": REQUEST_ID})
        ready = await client.get("/readyz")
        create = partial(client.post, "/v1/request", json=A_REQUEST)
        refused_create = await create()
        others = [asyncio.create_task(create(headers=other_firm)) for _ in range(8)]
        others += [asyncio.create_task(client.get("/v1/request", headers=other_firm)) for _ in range(8)]
        await asyncio.wait(others, timeout=0.1)

        assert {refused.status_code, refused_create.status_code} == {503}
        assert refused.headers["Retry-After"] == "1"
        assert refused.headers["X-Request-Id"] == REQUEST_ID
        assert refused.json()["errors"][0]["code"] == "unavailable"
        assert refused.elapsed.total_seconds() < 5  # 10 if it waits for the connection
        assert ready.status_code == 200
        await database.execute("COMMIT")
        assert {response.status_code for response in await asyncio.gather(*waiting)} == {200, 503}
        assert {response.status_code for response in await asyncio.gather(*others)} == {200}
