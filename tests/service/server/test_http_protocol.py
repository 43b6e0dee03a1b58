"""HTTP/1.1 on a connection: deadlines, sizes, framing, and callers that are no callers."""

import asyncio
import gc
import json
from contextvars import ContextVar
from http import HTTPStatus

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from service.api.outer_layer import OuterLayer
from service.app import create_app
from service.identifiers import parse_uuid
from service.server import limits
from service.server.asgi import Receive, Response, Scope, Send
from service.server.limits import LARGEST_BODY, LARGEST_HEAD, MOST_HEADERS
from tests.harness.databases import has_waiting_statement
from tests.harness.documented_errors import is_documented
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_client, serve, served
from tests.harness.metrics import rises, value
from tests.harness.raw_connection import connect_to, head, head_with
from tests.harness.waiting import eventually

REQUEST_ID = "case-17.a_B"
BODY = json.dumps(A_REQUEST).encode()
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
LENGTH, CHUNKED = f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked"


def create(client: httpx.AsyncClient, body: bytes = BODY) -> bytes:
    return head(client, f"Content-Length: {len(body)}") + body


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
async def test_input_that_is_not_http_is_refused_in_plain_text(shared_client, line, headers, status):
    connection = await connect_to(shared_client)
    connection.send("\r\n".join([line, *headers, "", ""]).encode("latin-1"))
    answer = await connection.answer()

    assert answer.status == status
    assert answer.body == b"The request is not valid HTTP." or status == 501
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert await connection.is_closed()


async def test_trailer_without_an_end_is_cut_off(shared_client):
    connection = await connect_to(shared_client)
    connection.send(head_with("invalid", "Transfer-Encoding: chunked") + b"1\r\n{\r\n0\r\nX: ")
    assert (await connection.answer()).status == 401

    connection.send(b"a" * (LARGEST_HEAD + 1))
    assert await connection.ends()


@pytest.mark.parametrize(("value", "count"), [("x" * 1000, LARGEST_HEAD // 1000), ("y", MOST_HEADERS)])
async def test_large_head_is_refused_in_one_piece_and_in_many(shared_client, value, count):
    lines = ["GET /livez HTTP/1.1", "Host: api", *[f"X-Long: {value}"] * count, "", ""]
    large = "\r\n".join(lines).encode()
    for size in (len(large), 5_000):
        connection = await connect_to(shared_client)
        await connection.send_in_pieces(large, size)
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


@pytest.mark.parametrize("framing", [LENGTH, CHUNKED])
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


async def test_pipelined_requests_wait_unparsed_and_are_answered_in_order(client, database):
    connection = await connect_to(client)
    async with database.transaction():
        await database.execute("LOCK TABLE calculation_request")
        connection.send(create(client))
        await eventually(lambda: has_waiting_statement(database))
        connection.send(b"GET /livez HTTP/1.1\r\nHost: api\r\n\r\n" * 1000)
        await asyncio.sleep(0.1)
        parsed = sum(isinstance(each, RequestResponseCycle) for each in gc.get_objects())
    connection.send(head(client, line="GET /v1/request HTTP/1.1"))

    statuses = {(await connection.answer()).status for _ in range(1001)}
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
        connection = await connect_to(base_url)
        connection.send(b"GET /first HTTP/1.1\r\nHost: api\r\n\r\n" * 3)
        for _ in range(3):
            await connection.answer()
        connection.hang_up()

    assert inherited == [None] * 3


_context: ContextVar[str | None] = ContextVar("_context", default=None)


async def test_large_body_does_not_count_as_a_large_head(client):
    large = create(client, BODY.ljust(LARGEST_BODY))
    connection = await connect_to(client)
    for _ in range(3):
        await connection.send_in_pieces(large, 10_000)
        assert (await connection.answer()).status == 200

    # On a pipelined connection one read can contain the end of a body and the start of a head.
    connection.send(large + b"GET /livez HTTP/1.1\r\nHost: api\r\n")
    assert (await connection.answer()).status == 200
    connection.send(b"\r\n")
    assert (await connection.answer()).status == 200


@pytest.mark.parametrize(("framing", "body"), [(LENGTH, BODY), (CHUNKED, CHUNK + b"0\r\n\r\n")])
@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_caller_that_offers_another_protocol_is_served_over_http_1_1(client, framing, body, size):
    """Java's HttpClient offers HTTP/2 with each request."""
    offer = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ"]
    sent = head(client, framing, *offer) + body + head(client, *offer, line="GET /v1/request HTTP/1.1")
    connection = await connect_to(client)
    await connection.send_in_pieces(2 * sent, size)

    answers = [await connection.answer() for _ in range(4)]

    assert [answer.status for answer in answers] == [200] * 4
    assert [len(json.loads(answers[at].body)["data"]["requests"]) for at in (1, 3)] == [1, 2]


async def test_body_after_an_offer_of_another_protocol_is_not_read_as_a_request(shared_client):
    """Otherwise a gateway would send the extra answer to the next caller."""
    body = head(shared_client, line="GET /v1/questionnaire/structure HTTP/1.1")
    connection = await connect_to(shared_client)
    connection.send(
        head(shared_client, f"Content-Length: {len(body)}", "Connection: Upgrade", "Upgrade: h2c")
    )
    await eventually(lambda: value("http_requests_in_progress") == 1)
    connection.send(body + head(shared_client, "Connection: close", line="GET /livez HTTP/1.1"))

    answers = [await connection.answer() for _ in range(2)]

    assert [answer.status for answer in answers] == [400, 200]
    assert await connection.is_closed()


@pytest.mark.parametrize(
    ("framing", "sent", "status", "closes"),
    [
        # Trailers are no headers: a gateway may have checked the headers only.
        (CHUNKED, CHUNK + b"0\r\nAuthorization: Bearer other\r\nIdempotency-Key: a b\r\n\r\n", 200, False),
        (CHUNKED, CHUNK + b"nonsense\r\n", 400, True),
        (LENGTH, BODY + b'{"more": "of it"}', 200, True),
    ],
    ids=["trailers", "nonsense within", "nonsense after"],
)
async def test_what_follows_a_body(client, framing, sent, status, closes):
    connection = await connect_to(client)
    connection.send(head(client, framing) + sent[:20])
    await eventually(lambda: value("http_requests_in_progress") == 1)
    connection.send(sent[20:])

    answer = await connection.answer()
    assert answer.status == status
    assert (answer.headers.get("connection") == "close") == closes
    assert not closes or await connection.is_closed()


@pytest.mark.parametrize(("framing", "sent"), [(LENGTH, BODY[:10]), (CHUNKED, b"")])
async def test_caller_that_hangs_up_is_one_log_line(client, database, framing, sent):
    connection = await connect_to(client)
    with capture_logs() as logs:
        connection.send(head(client, framing) + sent)
        await eventually(lambda: value("http_requests_in_progress") == 1)
        connection.hang_up()
        await eventually(lambda: served(logs))

    assert [(line["event"], line["log_level"]) for line in logs] == [("request_served", "info")]
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 0


async def test_create_interrupted_by_shutdown_is_answered_and_counted_as_503_and_logged_with_its_uuid(
    service_settings, issuer, database
):
    """It may have been stored nevertheless."""
    settings = msgspec.structs.replace(service_settings, database_timeout_seconds=20.0)
    async with database.transaction():
        await database.execute("LOCK TABLE calculation_request")
        with (
            capture_logs() as logs,
            rises("http_request_duration_seconds_count", method="POST", route="/v1/request", status="503"),
        ):
            async with serve(OuterLayer(create_app(settings)), shutdown_seconds=1.0) as base_url:
                connection = await connect_to(base_url)
                connection.send(head_with(issuer.token(), LENGTH, f"X-Request-Id: {REQUEST_ID}") + BODY)
                await eventually(lambda: has_waiting_statement(database))
    answer = await connection.answer()
    assert await connection.is_closed()

    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.headers["x-request-id"] == REQUEST_ID.lower()
    (error,) = json.loads(answer.body)["errors"]
    assert is_documented(503, "unavailable", error["message"])
    (line,) = served(logs)
    assert line["status"] == 503
    assert parse_uuid(line["uuid"])
