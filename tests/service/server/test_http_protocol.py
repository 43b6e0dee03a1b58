"""HTTP/1.1 on a connection: deadlines, sizes, framing, and callers that are no callers."""

import asyncio
import gc
import json
from contextvars import ContextVar
from http import HTTPStatus

import httpx
import pytest
from structlog.testing import capture_logs
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from service.app import create_app
from service.server import http_server, limits
from service.server.asgi import Receive, Response, Scope, Send
from service.server.http_server import listen
from service.server.limits import LARGEST_BODY, LARGEST_HEAD, MOST_HEADERS
from tests.harness.databases import has_waiting_statement
from tests.harness.documented_errors import is_documented
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_client, serve, served
from tests.harness.metrics import rises, value
from tests.harness.raw_connection import RawConnection, connect_to, head, head_with
from tests.harness.waiting import eventually

REQUEST_ID = "case-17.a_B"
BODY = json.dumps(A_REQUEST).encode()


def create(client: httpx.AsyncClient, body: bytes = BODY) -> bytes:
    """Return a whole create."""
    return head(client, f"Content-Length: {len(body)}") + body


@pytest.fixture
async def connect(client):
    """Opens connections to the API."""
    writers = []

    async def open_connection() -> RawConnection:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writers.append(writer)
        return RawConnection(reader, writer)

    yield open_connection
    for writer in writers:
        writer.transport.abort()


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        ("nonsense", [], 400),
        ("GET /livez HTTP/9.9", [], 400),
        ("GET /livez HTTP/1.1", ["Host : api"], 400),
        ("GET http:// HTTP/1.1", ["Host: api"], 400),
        ("GET /livez HTTP/1.1", [], 400),
        ("GET /livez HTTP/1.1", ["Host: api", "Host: api"], 400),
        ("POST /v1/request HTTP/1.1", ["Host: api", "Content-Length: minus"], 400),
        ("POST /v1/request HTTP/1.1", ["Host: api", "Content-Length: 3", "Transfer-Encoding: chunked"], 400),
        ("POST /v1/request HTTP/1.1", ["Host: api", "Content-Length: 3", "Content-Length: 4"], 400),
        ("\x16\x03\x01\x02\x01\x01\xfc\x03\x03", [], 400),  # TLS
        # Otherwise the body would be taken for JSON, and a gateway might find its end elsewhere.
        ("POST /v1/request HTTP/1.1", ["Host: api", "Transfer-Encoding: gzip, chunked"], 501),
    ],
)
async def test_input_that_is_not_http_is_refused_in_plain_text(connect, line, headers, status):
    connection = await connect()
    connection.send("\r\n".join([line, *headers, "", ""]).encode("latin-1"))
    answer = await connection.answer()

    assert answer.status == status
    assert answer.body == b"The request is not valid HTTP." or status == 501
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert await connection.is_closed()


async def test_trailer_without_an_end_is_cut_off(connect):
    connection = await connect()
    connection.send(head_with("invalid", "Transfer-Encoding: chunked") + b"1\r\n{\r\n0\r\nX: ")
    assert (await connection.answer()).status == 401

    connection.send(b"a" * (LARGEST_HEAD + 1))
    assert await connection.ends()


@pytest.mark.parametrize(("value", "count"), [("x" * 1000, LARGEST_HEAD // 1000), ("y", MOST_HEADERS)])
async def test_large_head_is_refused_in_one_piece_and_in_many(connect, value, count):
    lines = ["GET /livez HTTP/1.1", "Host: api", *[f"X-Long: {value}"] * count, "", ""]
    large = "\r\n".join(lines).encode()
    at_once, in_pieces = await connect(), await connect()
    at_once.send(large)
    for start in range(0, len(large), 5_000):
        in_pieces.send(large[start : start + 5_000])
        await asyncio.sleep(0)

    for connection in (at_once, in_pieces):
        assert (await connection.answer()).status == 431
        assert await connection.is_closed()


@pytest.fixture
async def impatient(service_settings, issuer, monkeypatch):
    """A client of an API that is as quick to give up as a test needs."""
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.3)
    async with api_client(service_settings, issuer.token(), database_timeout_seconds=20.0) as connected:
        yield connected


@pytest.mark.parametrize("beginning", [b"", b"G", b"GET /livez HTTP/1.1\r\nHost: api\r\n"])
async def test_incomplete_head_is_answered_408_unless_nothing_was_sent(impatient, beginning):
    connection = await connect_to(impatient)
    connection.send(beginning)
    with capture_logs() as logs:
        answered = await connection.rest()

    assert answered.startswith(b"HTTP/1.1 408") == bool(beginning)
    assert (b"did not arrive in time" in answered) == bool(beginning)
    assert served(logs) == []


@pytest.mark.parametrize(
    ("first", "piece", "statuses"),
    [
        (b"GET /livez HTTP/1.1\r\n", b"X: y\r\n", {b"408"}),
        (b"GET /livez HTTP/1.1\r\nHost: api\r\n\r\n", b"\r\n", {b"200"}),
    ],
    ids=["headers", "line breaks after a request"],
)
async def test_trickled_input_does_not_keep_a_connection_open(impatient, first, piece, statuses):
    connection = await connect_to(impatient)
    connection.send(first)
    answered = await connection.trickle(piece)

    assert answered[9:12] in statuses | {b""}  # The last piece may reset the connection before it is read.


@pytest.mark.parametrize("framing", ["Content-Length: 500", "Transfer-Encoding: chunked"])
async def test_missing_body_is_answered_408(impatient, database, framing):
    connection = await connect_to(impatient)
    with capture_logs() as logs:
        connection.send(head(impatient, framing, f"X-Request-Id: {REQUEST_ID}"))
        answer = await connection.answer()
        assert await connection.is_closed()
        await eventually(lambda: served(logs))

    assert answer.status == 408
    assert (answer.headers["connection"], answer.headers["x-request-id"]) == ("close", REQUEST_ID.lower())
    assert json.loads(answer.body)["errors"][0]["code"] == "request_timeout"
    assert [(line["route"], line["status"]) for line in served(logs)] == [("/v1/request", 408)]
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["Content-Length: 60000"], 401),
        ([f"Content-Length: {LARGEST_BODY + 1}"], 413),
        (["Transfer-Encoding: chunked"], 415),
    ],
)
async def test_body_of_a_refused_request_does_not_keep_a_connection_open(impatient, headers, status):
    connection = await connect_to(impatient)
    replaced = {401: (b"Bearer", b"Basic"), 415: (b"application/json", b"text/plain")}.get(status, (b"", b""))
    connection.send(head(impatient, *headers).replace(*replaced))
    assert (await connection.answer()).status == status

    await connection.trickle(b" " if status != 415 else b"1\r\n \r\n")


async def test_slow_service_does_not_count_against_the_caller_whose_next_error_is_answered_afterwards(
    impatient, database
):
    connection = await connect_to(impatient)
    async with database.transaction():
        await database.execute("LOCK TABLE calculation_request")
        connection.send(create(impatient) + head(impatient, "Transfer-Encoding: chunked") + b"no size\r\n")
        await eventually(lambda: has_waiting_statement(database))
        await asyncio.sleep(0.7)  # longer than the timeouts of head and body together

    assert (await connection.answer()).status == 200
    assert (await connection.answer()).status in {400, 408}
    assert await connection.is_closed()


async def test_pipelined_requests_wait_unparsed_and_are_answered_in_order(client, connect, database):
    connection = await connect()
    async with database.transaction():
        await database.execute("LOCK TABLE calculation_request")
        connection.send(create(client))
        await eventually(lambda: has_waiting_statement(database))
        connection.send(b"GET /livez HTTP/1.1\r\nHost: api\r\n\r\n" * 5000)
        await asyncio.sleep(0.1)
        parsed = sum(isinstance(each, RequestResponseCycle) for each in gc.get_objects())
    connection.send(head(client, line="GET /v1/request HTTP/1.1"))

    statuses = {(await connection.answer()).status for _ in range(5001)}
    assert parsed == 2, "the one that is answered, and the one that waits"
    assert statuses == {200}
    assert len(json.loads((await connection.answer()).body)["data"]["requests"]) == 1


async def test_pipelined_request_has_a_context_of_its_own():
    """Otherwise it would continue the trace of the request before it."""
    inherited = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            inherited.append(_context.get())
            _context.set(scope["path"])
            await asyncio.sleep(0)
            await Response.of(HTTPStatus.OK, b"text/plain", b"")(scope, receive, send)

    async with serve(app) as base_url:
        connection = RawConnection(*await asyncio.open_connection(*base_url[7:].split(":")))
        connection.send(b"GET /first HTTP/1.1\r\nHost: api\r\n\r\n" * 3)
        for _ in range(3):
            await connection.answer()
        connection.hang_up()

    assert inherited == [None] * 3


_context: ContextVar[str | None] = ContextVar("_context", default=None)


async def test_caller_that_does_not_read_its_answers_is_disconnected(impatient):
    connection = await connect_to(impatient)
    connection.send(b"GET /schema/openapi.json HTTP/1.1\r\nHost: api\r\n\r\n" * 1000)

    await eventually(connection.is_cut_off)
    await eventually(lambda: value("http_requests_in_progress") == 0)
    connection.hang_up()


async def test_large_body_does_not_count_as_a_large_head(client, connect):
    large = create(client, BODY.ljust(LARGEST_BODY))
    connection = await connect()
    for _ in range(3):  # on one connection, in small pieces
        for start in range(0, len(large), 10_000):
            connection.send(large[start : start + 10_000])
            await asyncio.sleep(0)
        assert (await connection.answer()).status == 200

    # On a pipelined connection one read can contain the end of a body and the start of a head.
    connection.send(large + b"GET /livez HTTP/1.1\r\nHost: api\r\n")
    assert (await connection.answer()).status == 200
    connection.send(b"\r\n")
    assert (await connection.answer()).status == 200


@pytest.mark.parametrize("framing", ["Content-Length", "Transfer-Encoding"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_caller_that_offers_another_protocol_is_served_over_http_1_1(client, connect, framing, size):
    """Java's HttpClient offers HTTP/2 with each request."""
    offer = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ"]
    if framing == "Content-Length":
        sent = head(client, f"Content-Length: {len(BODY)}", *offer) + BODY
    else:
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
        sent = head(client, "Transfer-Encoding: chunked", *offer) + chunks
    sent = 2 * (sent + head(client, *offer, line="GET /v1/request HTTP/1.1"))
    connection = await connect()
    for start in range(0, len(sent), size):
        connection.send(sent[start : start + size])
        await asyncio.sleep(0)

    answers = [await connection.answer() for _ in range(4)]

    assert [answer.status for answer in answers] == [200] * 4
    assert [len(json.loads(answers[at].body)["data"]["requests"]) for at in (1, 3)] == [1, 2]


async def test_body_after_an_offer_of_another_protocol_is_not_read_as_a_request(client, connect):
    """Otherwise a gateway would send the extra answer to the next caller."""
    body = head(client, line="GET /v1/questionnaire/structure HTTP/1.1")
    connection = await connect()
    connection.send(head(client, f"Content-Length: {len(body)}", "Connection: Upgrade", "Upgrade: h2c"))
    await eventually(lambda: value("http_requests_in_progress") == 1)
    connection.send(body + head(client, "Connection: close", line="GET /livez HTTP/1.1"))

    answers = [await connection.answer() for _ in range(2)]

    assert [answer.status for answer in answers] == [400, 200]
    assert await connection.is_closed()


@pytest.mark.parametrize(
    ("framing", "sent", "status", "closes"),
    [
        # Trailers are no headers: a gateway may have checked the headers only.
        (
            "chunked",
            b"%x\r\n%s\r\n0\r\nAuthorization: Bearer other\r\nIdempotency-Key: a b\r\n\r\n",
            200,
            False,
        ),
        ("chunked", b"%x\r\n%s\r\nnonsense\r\n", 400, True),
        ("length", b'{"more": "of it"}', 200, True),  # The body is longer than its Content-Length.
    ],
    ids=["trailers", "nonsense within", "nonsense after"],
)
async def test_what_follows_a_body(client, connect, framing, sent, status, closes):
    connection = await connect()
    if framing == "length":
        connection.send(create(client) + sent)
    else:
        chunks = sent % (len(BODY), BODY)
        connection.send(head(client, "Transfer-Encoding: chunked") + chunks[:20])
        await eventually(lambda: value("http_requests_in_progress") == 1)
        connection.send(chunks[20:])

    answer = await connection.answer()
    assert answer.status == status
    assert (answer.headers.get("connection") == "close") == closes
    assert not closes or await connection.is_closed()


@pytest.mark.parametrize("framing", ["Content-Length: 500", "Transfer-Encoding: chunked"])
async def test_caller_that_hangs_up_is_one_log_line(client, connect, database, framing):
    connection = await connect()
    with capture_logs() as logs:
        connection.send(head(client, framing) + (b"" if "chunked" in framing else b'{"notes": "'))
        await eventually(lambda: value("http_requests_in_progress") == 1)
        connection.hang_up()
        await eventually(lambda: served(logs))

    assert [(line["event"], line["log_level"]) for line in logs] == [("request_served", "info")]
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 0


async def test_request_interrupted_by_shutdown_is_answered_and_counted_as_503(service_settings, issuer):
    stop = asyncio.Event()
    api = create_app(service_settings)
    with listen("127.0.0.1", 0) as listening:
        serving = asyncio.create_task(http_server.serve(api, listening, stop, shutdown_seconds=1.0))
        connection = RawConnection(*await asyncio.open_connection(*listening.getsockname()))
        with (
            capture_logs() as logs,
            rises("http_request_duration_seconds_count", method="POST", route="/v1/request", status="503"),
        ):
            connection.send(head_with(issuer.token(), "Content-Length: 500", f"X-Request-Id: {REQUEST_ID}"))
            await eventually(lambda: value("http_requests_in_progress") == 1)
            stop.set()
            answer = await connection.answer()
            await serving
        assert await connection.is_closed()
        connection.hang_up()

    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.headers["x-request-id"] == REQUEST_ID.lower()
    (error,) = json.loads(answer.body)["errors"]
    assert is_documented(503, "unavailable", error["message"])
    assert [line["status"] for line in served(logs)] == [503]
