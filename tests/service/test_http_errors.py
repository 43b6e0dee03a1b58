"""Errors of the server itself: all have the envelope and X-Request-Id, and each is one line in the log."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from service.app import LARGEST_BODY
from service.http_server import LARGEST_HEAD
from service.identifiers import new_request_id, uuid_of
from service.postgres import Connection
from service.settings import ServiceSettings
from tests.conftest import A_REQUEST, Issuer, api_client, eventually, someone_waits
from tests.metrics import rises, value

REQUEST_ID = "case-17.a_B"
STRUCTURE = "/v1/questionnaire/structure"
JSON = {"Content-Type": "application/json"}
NO_BODY = {204, 304}
END_OTHER_SESSIONS = """
    SELECT pg_terminate_backend(pid)
      FROM pg_stat_activity
     WHERE datname = current_database()
       AND pid <> pg_backend_pid()
"""


class Answer(msgspec.Struct):
    """An answer as it came over the wire."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


class RawConnection:
    """A connection on which anything can be sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        """Send these bytes."""
        self._writer.write(data)

    def hang_up(self) -> None:
        """Go without a word."""
        self._writer.transport.abort()

    async def answer(self) -> Answer:
        """Read one answer."""
        async with asyncio.timeout(10):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(int(head[0].split(" ")[1]), headers, body)

    async def is_closed(self) -> bool:
        """Whether the server has nothing more to say, and has hung up."""
        async with asyncio.timeout(10):
            return await self._reader.read() == b""


Connect = Callable[[], Any]


@pytest.fixture
async def connect(client: httpx.AsyncClient) -> AsyncIterator[Connect]:
    """Opens connections to the API."""
    writers = []

    async def open_connection() -> RawConnection:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writers.append(writer)
        return RawConnection(reader, writer)

    yield open_connection
    for writer in writers:
        writer.transport.abort()


def head(client: httpx.AsyncClient, *headers: str, line: str = "POST /v1/request HTTP/1.1") -> bytes:
    """Return the head of a request with the client's token."""
    authorization = f"Authorization: {client.headers['Authorization']}"
    usual = ["Host: api", authorization, "Content-Type: application/json"]
    return "\r\n".join([line, *usual, *headers, "", ""]).encode()


async def test_every_answer_carries_the_request_id_and_so_does_its_one_log_line(
    client: httpx.AsyncClient, issuer: Issuer, database: Connection
) -> None:
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
            response = await client.request(
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


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET /livez HTTP/9.9\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost : api\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nHost: api\r\n\r\n",
        b"POST /v1/request HTTP/1.1\r\nHost: api\r\nContent-Length: minus\r\n\r\n",
        b"POST /v1/request HTTP/1.1\r\nHost: api\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/request HTTP/1.1\r\nHost: api\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n{}",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    ],
)
async def test_what_is_not_http_is_refused_in_the_envelope(connect: Connect, sent: bytes) -> None:
    connection = await connect()
    with capture_logs() as logs:
        connection.send(sent)
        answer = await connection.answer()

    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.headers["x-request-id"]) == 32
    assert json.loads(answer.body)["errors"][0]["code"] == "malformed_request"
    assert await connection.is_closed()
    assert [line["status"] for line in served(logs)] == [400]


async def test_head_without_end_is_refused(connect: Connect) -> None:
    connection = await connect()
    connection.send(b"GET /livez HTTP/1.1\r\nHost: api\r\nX-Long: ")
    await asyncio.sleep(0.05)
    connection.send(b"x" * (LARGEST_HEAD + 1))
    answer = await connection.answer()

    assert answer.status == 431
    assert json.loads(answer.body)["errors"][0]["code"] == "head_too_large"


@pytest.mark.parametrize("line", ["X-Long: " + "x" * 1000 + "\r\n", "X: y\r\n"])
async def test_large_head_is_refused_however_it_arrives(connect: Connect, line: str) -> None:
    large = f"GET /livez HTTP/1.1\r\nHost: api\r\n{line * (LARGEST_HEAD // len(line) + 1)}\r\n".encode()
    at_once, in_pieces = await connect(), await connect()
    at_once.send(large)
    for start in range(0, len(large), 5_000):
        in_pieces.send(large[start : start + 5_000])
        await asyncio.sleep(0)

    for connection in (at_once, in_pieces):
        assert (await connection.answer()).status == 431
        assert await connection.is_closed()


@pytest.mark.parametrize("rest", [b"", b"X-Long: " + b"x" * (LARGEST_HEAD + 1)])
async def test_head_after_a_large_body_costs_nobody_an_answer(
    client: httpx.AsyncClient, connect: Connect, rest: bytes
) -> None:
    """As on a pipelined connection, where one read has the end of a body and the begin of a head."""
    body = json.dumps(A_REQUEST).encode().ljust(LARGEST_BODY)
    connection = await connect()
    connection.send(head(client, f"Content-Length: {len(body)}") + body)
    connection.send(b"GET /livez HTTP/1.1\r\nHost: api\r\n" + rest)

    first = await connection.answer()
    assert first.status == 200
    if rest:
        assert await connection.is_closed()
    else:
        connection.send(b"\r\n")
        assert (await connection.answer()).status == 200


async def test_large_body_is_no_large_head(client: httpx.AsyncClient, connect: Connect) -> None:
    body = json.dumps(A_REQUEST).encode().ljust(LARGEST_BODY)
    connection = await connect()
    for _ in range(3):  # on one connection, in small pieces
        connection.send(head(client, f"Content-Length: {len(body)}"))
        for start in range(0, len(body), 10_000):
            connection.send(body[start : start + 10_000])
            await asyncio.sleep(0)
        assert (await connection.answer()).status == 200


async def test_nonsense_after_a_request_does_not_cost_its_answer(
    client: httpx.AsyncClient, connect: Connect
) -> None:
    """As when the body is longer than its announced length."""
    body = json.dumps(A_REQUEST).encode()
    connection = await connect()
    connection.send(head(client, f"Content-Length: {len(body)}") + body + b'{"more": "of it"}')

    answer = await connection.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await connection.is_closed()


async def test_nonsense_within_a_body_is_refused(client: httpx.AsyncClient, connect: Connect) -> None:
    connection = await connect()
    connection.send(head(client, "Transfer-Encoding: chunked") + b"2\r\n{}\r\n")
    await eventually(lambda: value("http_requests_in_progress") == 1)
    connection.send(b"nonsense\r\n")

    assert (await connection.answer()).status == 400
    assert await connection.is_closed()


async def test_length_that_is_too_much_is_refused_before_the_body_is_sent(
    client: httpx.AsyncClient, connect: Connect
) -> None:
    connection = await connect()
    connection.send(head(client, f"Content-Length: {LARGEST_BODY + 1}", "Expect: 100-continue"))

    assert (await connection.answer()).status == 413


async def test_chunks_without_end_are_refused(client: httpx.AsyncClient, connect: Connect) -> None:
    connection = await connect()
    connection.send(head(client, "Transfer-Encoding: chunked"))
    for _ in range(LARGEST_BODY // 1024 + 1):
        connection.send(b"400\r\n" + b" " * 1024 + b"\r\n")

    assert (await connection.answer()).status == 413


async def test_caller_that_asks_first_is_told_to_go_on_or_not(
    client: httpx.AsyncClient, connect: Connect
) -> None:
    body = json.dumps(A_REQUEST).encode()
    expectation = (f"Content-Length: {len(body)}", "Expect: 100-continue")
    welcome, unwelcome = await connect(), await connect()

    welcome.send(head(client, *expectation))
    told = await welcome.answer()
    welcome.send(body)
    unwelcome.send(head(client, *expectation).replace(b"application/json", b"text/plain"))

    assert told.status == 100
    assert (await welcome.answer()).status == 200
    assert (await unwelcome.answer()).status == 415


@pytest.mark.parametrize("framing", ["Content-Length: 500", "Transfer-Encoding: chunked"])
async def test_caller_that_hangs_up_is_one_log_line(
    client: httpx.AsyncClient, connect: Connect, database: Connection, framing: str
) -> None:
    connection = await connect()
    with capture_logs() as logs:
        connection.send(head(client, framing) + (b"" if "chunked" in framing else b'{"notes": "'))
        await eventually(lambda: value("http_requests_in_progress") == 1)
        connection.hang_up()
        await eventually(lambda: served(logs))

    assert [(line["event"], line["log_level"]) for line in logs] == [("request_served", "info")]
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 0


@pytest.mark.parametrize("path", ["/livez", "/readyz", STRUCTURE, "/nonsense", "/v1/request/nonsense"])
async def test_head_is_get_without_its_body(client: httpx.AsyncClient, path: str) -> None:
    expected = await client.get(path)
    with capture_logs() as logs:
        response = await client.head(path)
        await eventually(lambda: served(logs))

    assert response.content == b""
    assert response.status_code == expected.status_code
    varying = {"x-request-id", "date"}
    assert {name: value for name, value in response.headers.items() if name not in varying} == {
        name: value for name, value in expected.headers.items() if name not in varying
    }
    assert served(logs)[0]["method"] == "HEAD"


async def test_methods_are_told(client: httpx.AsyncClient) -> None:
    for path in (STRUCTURE, f"/v1/request/{uuid_of(new_request_id())}"):
        asked = await client.options(path)
        refused = await client.delete(path)

        assert (asked.status_code, asked.content) == (204, b"")
        for response in (asked, refused):
            assert set(response.headers["Allow"].split(", ")) == {"GET", "HEAD", "OPTIONS"}


async def test_what_needs_a_token_is_kept_by_no_cache(client: httpx.AsyncClient) -> None:
    created = await client.post("/v1/request", json=A_REQUEST)
    retrieved = await client.get(f"/v1/request/{created.json()['data']['uuid']}")

    for response in (created, retrieved, await client.get("/nonsense")):
        assert response.headers["Cache-Control"] == "no-store"


async def test_busy_process_turns_callers_away_at_the_door_and_stays_ready(
    service_settings: ServiceSettings, issuer: Issuer, database: Connection
) -> None:
    settings = msgspec.structs.replace(service_settings, database_pool_size=1, database_queue_size=0)
    async with api_client(settings, issuer.token()) as client, database.transaction():
        await client.get("/readyz")
        await database.execute("LOCK TABLE calculation_request")
        waiting = asyncio.create_task(client.post("/v1/request", json=A_REQUEST))
        await eventually(lambda: someone_waits(database))
        with (
            rises("postgres_unavailable_total"),
            rises("http_request_duration_seconds_count", method="GET", route=STRUCTURE, status="503"),
        ):
            refused = await client.get(STRUCTURE, headers={"X-Request-Id": REQUEST_ID})
        ready = await client.get("/readyz")

        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        assert refused.headers["X-Request-Id"] == REQUEST_ID
        assert refused.json()["errors"][0]["code"] == "unavailable"
        assert refused.elapsed.total_seconds() < 0.3
        assert ready.status_code == 200
        assert (await waiting).status_code == 503


async def test_cause_of_a_503_is_logged(client: httpx.AsyncClient, database: Connection) -> None:
    with capture_logs() as logs:
        async with database.transaction():
            await database.execute("LOCK TABLE calculation_request")
            response = await client.post("/v1/request", json=A_REQUEST)

    assert response.status_code == 503
    warning = next(line for line in logs if line["log_level"] == "warning")
    assert warning["event"] == "request_turned_away"
    assert warning["error"].startswith("PostgresUnavailable (TimeoutError")


async def test_api_recovers_by_itself_when_postgres_takes_writes_again(
    client: httpx.AsyncClient, database: Connection
) -> None:
    name = await database.fetchval("SELECT current_database()")

    async def statuses() -> tuple[int, int]:
        created = await client.post("/v1/request", json=A_REQUEST)
        return created.status_code, (await client.get("/readyz")).status_code

    assert await statuses() == (200, 200)
    await database.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    await database.execute(END_OTHER_SESSIONS)
    await eventually(lambda: until(statuses, (503, 503)))
    assert await statuses() == (503, 503)
    await database.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')

    await eventually(lambda: until(statuses, (200, 200)))


async def until(look: Callable[[], Awaitable[object]], expected: object) -> bool:
    """Whether *look* returns what is expected by now."""
    return await look() == expected


def served(logs: list[Any]) -> list[Any]:
    """Return the lines of the access log."""
    return [line for line in logs if line["event"] == "request_served"]
