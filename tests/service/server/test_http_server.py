"""HTTP/1.1 on a connection: deadlines, sizes, framing, shutdown, and callers that are no callers."""

import asyncio
import json
import socket
from http import HTTPStatus

import msgspec
import pytest
from structlog.testing import capture_logs

from deploy.local.machine.ports import free_port
from service.api.outer_layer import OuterLayer
from service.app import create_app
from service.identifiers import parse_uuid
from service.server import http_server, limits
from service.server.asgi import Receive, Response, Scope, Send
from service.server.limits import LARGEST_BODY, LARGEST_HEAD
from service.settings import InvalidSetting
from tests.harness.databases import has_waiting_statement
from tests.harness.documented_errors import is_documented
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_client, serve, served, serving
from tests.harness.metrics import rises, value
from tests.harness.raw_connection import connect_to, head, head_with
from tests.harness.waiting import eventually

REQUEST_ID = "case-17.a_B"
BODY = json.dumps(A_REQUEST).encode()
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
CREATE, GZIP = "POST /v1/request HTTP/1.1", ("Host: api", "Transfer-Encoding: gzip")
LENGTH, CHUNKED = f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked"
ROOT = b"GET / HTTP/1.1\r\nHost: api\r\n\r\n"


@pytest.mark.parametrize(
    ("lines", "status", "code"),
    [
        (["nonsense"], 400, None),
        (["GET / HTTP/1.1", "Host : api"], 400, None),
        ([CREATE, "Host: api", "Content-Length: 3", "Content-Length: 4"], 400, None),
        ([CREATE, *GZIP], 400, None),
        (["\x16\x03\x01\x02\x01\x01\xfc\x03\x03"], 400, None),  # TLS
        ([CREATE], 400, "malformed_request"),
        ([CREATE, "Host: api", "Host: api"], 400, "malformed_request"),
        *(
            ([CREATE, f"Host: {each}"], 400, "malformed_request")
            for each in ("a@b", "a/b", "a b", "a, b", "a:b")
        ),
        # Otherwise the body would be taken for JSON, and a gateway might find its end elsewhere.
        ([CREATE, "Host: api", "Transfer-Encoding: gzip, chunked"], 501, "unsupported_transfer_encoding"),
        ([CREATE, *GZIP, CHUNKED], 501, "unsupported_transfer_encoding"),
        ([CREATE, "Host: api", CHUNKED, CHUNKED], 501, "unsupported_transfer_encoding"),
        ([CREATE, "Host: api", f"{CHUNKED}, chunked"], 501, "unsupported_transfer_encoding"),
        ([CREATE.replace("1.1", "1.0"), "Host: api", CHUNKED], 400, None),
    ],
)
async def test_what_a_gateway_may_read_differently_is_refused_and_without_a_body_if_it_is_not_http(
    shared_client, lines, status, code
):
    connection = await connect_to(shared_client)
    connection.send("\r\n".join([*lines, "", ""]).encode("latin-1"))
    answer = await connection.answer()

    assert answer.status == status
    assert await connection.is_closed()
    assert bool(answer.body) == (code is not None)
    errors = json.loads(answer.body)["errors"] if answer.body else []
    assert [error["code"] for error in errors] == ([code] if code else [])
    assert all(is_documented(status, error["code"], error["message"]) for error in errors)


@pytest.mark.parametrize(("value", "count"), [("x" * 1000, 2 * LARGEST_HEAD // 1000), ("y", 100)])
async def test_large_head_is_refused_in_one_piece_and_in_many(shared_client, value, count):
    lines = ["GET / HTTP/1.1", "Host: api", *[f"X-Long: {value}"] * count, "", ""]
    large = "\r\n".join(lines).encode()
    for size in (len(large), 5_000):
        connection = await connect_to(shared_client)
        try:
            await connection.send_in_pieces(large, size)
            assert (await connection.answer()).status == 431
            assert await connection.is_closed()
        except (ConnectionError, asyncio.IncompleteReadError):
            # What the server has not read when it closes resets the connection.
            assert len(large) > LARGEST_HEAD


@pytest.fixture
async def impatient(service_settings, issuer, monkeypatch):
    """A client of an API that is as quick to give up as a test needs."""
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.3)
    async with api_client(
        service_settings, issuer.token(), database_timeout_seconds=20.0, keep_alive_seconds=1
    ) as connected:
        yield connected


@pytest.mark.parametrize("beginning", [b"", b"G", b"GET / HTTP/1.1\r\nHost: api\r\n", ROOT])
async def test_silent_caller_is_cut_off(impatient, beginning):
    connection = await connect_to(impatient)
    connection.send(beginning)

    assert (await connection.rest()).startswith(b"HTTP/1.1 302") == (beginning == ROOT)


@pytest.mark.parametrize(
    ("first", "piece"),
    [(b"GET / HTTP/1.1\r\n", b"X: y\r\n"), (ROOT, b"\r\n")],
    ids=["headers", "line breaks after a request"],
)
async def test_trickled_input_does_not_keep_a_connection_open(impatient, first, piece):
    connection = await connect_to(impatient)
    connection.send(first)

    await connection.trickle(piece)


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


async def test_pipelined_requests_wait_and_are_answered_in_order(client, database):
    connection = await connect_to(client)
    async with database.transaction():
        await database.execute("LOCK TABLE calculation_request")
        connection.send(head(client, LENGTH) + BODY + ROOT * 1000)
        await eventually(lambda: has_waiting_statement(database))
        assert value("http_requests_in_progress") == 1
    connection.send(head(client, line="GET /v1/request HTTP/1.1"))

    statuses = {(await connection.answer()).status for _ in range(1001)}
    assert statuses == {200, 302}
    assert len(json.loads((await connection.answer()).body)["data"]["requests"]) == 1


@pytest.mark.parametrize(("framing", "body"), [(LENGTH, BODY), (CHUNKED, CHUNK + b"0\r\n\r\n")])
@pytest.mark.parametrize("size", [7, 10_000])
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
    offer = ["Connection: Upgrade", "Upgrade: h2c"]
    connection.send(head(shared_client, f"Content-Length: {len(body)}", *offer))
    await eventually(lambda: value("http_requests_in_progress") == 1)
    connection.send(body + head(shared_client, "Connection: close", line="GET /schema HTTP/1.1"))

    answers = [await connection.answer() for _ in range(2)]

    assert [answer.status for answer in answers] == [400, 200]
    assert await connection.is_closed()


@pytest.mark.parametrize(
    ("framing", "sent", "status", "closes"),
    [
        # Trailers are no headers: a gateway may have checked the headers only.
        (CHUNKED, CHUNK + b"0\r\nAuthorization: Bearer other\r\nIdempotency-Key: a b\r\n\r\n", 200, False),
        (CHUNKED, CHUNK + b"nonsense\r\n", 400, True),
        (f"Content-Length: 3\r\n{CHUNKED}", CHUNK + b"0\r\n\r\n", 200, True),
        (LENGTH, BODY + b'{"more": "of it"}', 200, True),
    ],
    ids=["trailers", "nonsense within", "a length as well", "nonsense after"],
)
async def test_what_follows_a_body(client, framing, sent, status, closes):
    connection = await connect_to(client)
    connection.send(head(client, framing) + sent[:20])
    await eventually(lambda: value("http_requests_in_progress") == 1)
    connection.send(sent[20:])

    answer = await connection.answer()
    assert answer.status == status
    assert not closes or b"HTTP/1.1 2" not in await connection.rest()


async def test_create_interrupted_by_shutdown_is_503_and_logged_with_uuid(service_settings, issuer, database):
    """It may have been stored nevertheless."""
    settings = msgspec.structs.replace(service_settings, database_timeout_seconds=20.0)
    counted = "http_request_duration_seconds_count"
    async with database.transaction():
        await database.execute("LOCK TABLE calculation_request")
        with capture_logs() as logs, rises(counted, method="POST", route="/v1/request", status="503"):
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


async def empty_answers(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await Response.of(HTTPStatus.OK, b"text/plain", b"")(scope, receive, send)


async def test_kept_connection_gets_no_error_while_the_server_stops():
    """Each answer says that the connection ends, so the caller makes its next call elsewhere."""
    stop = asyncio.Event()
    async with serving(empty_answers, stop, drain_seconds=0.5, shutdown_seconds=5.0) as (base_url, task):
        kept = [await connect_to(base_url) for _ in range(3)]
        for connection in kept:
            connection.send(ROOT)
            assert "connection" not in (await connection.answer()).headers
        stop.set()
        for connection in (*kept[:2], await connect_to(base_url)):
            connection.send(ROOT)
            answer = await connection.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await connection.is_closed()
        assert await kept[2].ends(), "it was idle"
        await task


async def test_caller_that_reads_nothing_does_not_keep_the_process():
    stop, asked = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            asked.set()
            await Response.of(HTTPStatus.OK, b"text/plain", bytes(50_000_000))(scope, receive, send)

    async with serving(app, stop, shutdown_seconds=0.2) as (base_url, task):
        connection = await connect_to(base_url)
        connection.send(ROOT)
        await asked.wait()
        stop.set()
        async with asyncio.timeout(10):
            await task
        connection.hang_up()


async def test_server_whose_application_does_not_start_fails_and_logs_no_values():
    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "secret"})
        raise ValueError("secret")

    with capture_logs() as logs, pytest.raises(http_server.ServerFailed):
        await http_server.serve(app, ("127.0.0.1", free_port()), asyncio.Event(), shutdown_seconds=1.0)

    (failed, ended) = logs
    assert (failed["event"], failed["scope"]) == ("application_failed", "lifespan")
    assert (failed["error"], ended["event"]) == ("ValueError", "server_failed")
    assert "secret" not in str(logs)


def test_port_that_another_process_listens_on_is_refused():
    """Granian would share it."""
    other = socket.create_server(("127.0.0.1", 0), reuse_port=True)
    with other, pytest.raises(InvalidSetting, match="Address already in use"):
        http_server.find_address("127.0.0.1", other.getsockname()[1])
