"""HTTP/1.1 on a connection: deadlines, sizes, framing, shutdown, and callers that are no callers."""

import asyncio
import json
import socket
from functools import partial
from http import HTTPStatus
from itertools import product

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
from tests.harness.examples import A_REQUEST
from tests.harness.http import connect_to, head, is_documented
from tests.harness.in_process import api_client, serve, served, serving
from tests.harness.metrics import rises, value
from tests.harness.waiting import eventually

REQUEST_ID = "case-17.a_B"
BODY = json.dumps(A_REQUEST).encode()
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
CREATE = "POST /v1/request HTTP/1.1\nHost: api"
TLS, UNSUPPORTED = "\x16\x03\x01\x02\x01\x01\xfc\x03\x03", "unsupported_transfer_encoding"
NO_HOSTS, GZIP = ("a@b", "a/b", "a b", "a, b", "a:b"), "Transfer-Encoding: gzip"
LENGTH, CHUNKED = f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked"
ROOT = b"GET / HTTP/1.1\r\nHost: api\r\n\r\n"


@pytest.mark.parametrize(
    ("status", "code", "heads"),
    [
        (400, None, ["nonsense", TLS, "GET / HTTP/1.1\nHost : api"]),
        (400, None, [f"{CREATE}\n{rest}" for rest in ("Content-Length: 3\nContent-Length: 4", GZIP)]),
        (400, None, [f"{CREATE}\n{CHUNKED}".replace("1.1", "1.0")]),
        (400, "malformed_request", [CREATE.partition("\n")[0], f"{CREATE}\nHost: api"]),
        (400, "malformed_request", [CREATE.replace("api", host) for host in NO_HOSTS]),
        # Otherwise the body would be taken for JSON, and a gateway might find its end elsewhere.
        (501, UNSUPPORTED, [f"{CREATE}\n{GZIP}{rest}" for rest in (", chunked", f"\n{CHUNKED}")]),
        (501, UNSUPPORTED, [f"{CREATE}\n{CHUNKED}{rest}" for rest in (", chunked", f"\n{CHUNKED}")]),
    ],
)
async def test_what_a_gateway_may_read_differently_is_refused(shared_client, status, code, heads):
    for lines in heads:
        connection = await connect_to(shared_client)
        connection.send(f"{lines}\n\n".replace("\n", "\r\n").encode("latin-1"))
        answer = await connection.answer()

        assert answer.status == status, lines
        assert await connection.is_closed()
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
    bounds = {"database_timeout_seconds": 20.0, "keep_alive_seconds": 1}
    async with api_client(service_settings, issuer.token(), **bounds) as connected:
        yield connected


async def test_caller_that_is_silent_or_trickles_is_cut_off(impatient):
    async def rest_after(beginning: bytes) -> bytes:
        connection = await connect_to(impatient)
        connection.send(beginning)
        return await connection.rest()

    async def trickle(first: bytes, piece: bytes) -> None:
        connection = await connect_to(impatient)
        connection.send(first)
        await connection.trickle(piece)

    rests, *_ = await asyncio.gather(
        asyncio.gather(*map(rest_after, (b"", b"G", b"GET / HTTP/1.1\r\nHost: api\r\n", ROOT))),
        trickle(b"GET / HTTP/1.1\r\n", b"X: y\r\n"),
        trickle(ROOT, b"\r\n"),
    )

    assert [each.startswith(b"HTTP/1.1 302") for each in rests] == [False, False, False, True]


async def test_missing_body_is_answered_408(impatient, database):
    for framing in (LENGTH, CHUNKED):
        connection = await connect_to(impatient)
        with capture_logs() as logs:
            connection.send(head(impatient, framing, f"X-Request-Id: {REQUEST_ID}"))
            answer = await connection.answer()
            assert await connection.is_closed()
            (line,) = await eventually(partial(served, logs))

        headers = (answer.headers["connection"], answer.headers["x-request-id"])
        assert (answer.status, *headers) == (408, "close", REQUEST_ID.lower())
        assert json.loads(answer.body)["errors"][0]["code"] == "request_timeout"
        assert (line["route"], line["status"]) == ("/v1/request", 408)
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 0


async def test_body_of_a_refused_request_does_not_keep_a_connection_open(impatient):
    refused = [
        (401, "Content-Length: 60000", (b"Bearer", b"Basic"), b" "),
        (413, f"Content-Length: {LARGEST_BODY + 1}", (b"", b""), b" "),
        (415, CHUNKED, (b"application/json", b"text/plain"), b"1\r\n \r\n"),
    ]
    for status, framing, replaced, piece in refused:
        connection = await connect_to(impatient)
        connection.send(head(impatient, framing).replace(*replaced))
        assert (await connection.answer()).status == status

        await connection.trickle(piece)


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


async def test_caller_that_offers_another_protocol_is_served_over_http_1_1(client):
    """Java's HttpClient offers HTTP/2 with each request."""
    offer = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ"]
    listing, counts = head(client, *offer, line="GET /v1/request HTTP/1.1"), []
    for (framing, body), size in product(((LENGTH, BODY), (CHUNKED, CHUNK + b"0\r\n\r\n")), (7, 10_000)):
        connection = await connect_to(client)
        await connection.send_in_pieces(2 * (head(client, framing, *offer) + body + listing), size)
        answers = [await connection.answer() for _ in range(4)]
        assert [answer.status for answer in answers] == [200] * 4
        counts += [len(json.loads(answers[at].body)["data"]["requests"]) for at in (1, 3)]

    assert counts == [*range(1, 9)]


async def test_body_after_an_offer_of_another_protocol_is_not_read_as_a_request(shared_client):
    """Otherwise a gateway would send the extra answer to the next caller."""
    body = head(shared_client, line="GET /v1/questionnaire/structure HTTP/1.1")
    connection = await connect_to(shared_client)
    offer = ["Connection: Upgrade", "Upgrade: h2c"]
    connection.send(head(shared_client, f"Content-Length: {len(body)}", *offer))
    await eventually(lambda: value("http_requests_in_progress") == 1)
    connection.send(body + head(shared_client, "Connection: close", line="GET /schema HTTP/1.1"))

    assert [(await connection.answer()).status for _ in range(2)] == [400, 200]
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
async def test_what_follows_a_body(shared_client, framing, sent, status, closes):
    connection = await connect_to(shared_client)
    connection.send(head(shared_client, framing) + sent[:20])
    await eventually(lambda: value("http_requests_in_progress") == 1)
    connection.send(sent[20:])

    assert (await connection.answer()).status == status
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
                connection.send(head(issuer.token(), LENGTH, f"X-Request-Id: {REQUEST_ID}") + BODY)
                await eventually(lambda: has_waiting_statement(database))
    answer = await connection.answer()
    assert await connection.is_closed()

    headers = (answer.headers["retry-after"], answer.headers["x-request-id"])
    assert (answer.status, *headers) == (503, "1", REQUEST_ID.lower())
    (error,), (line,) = json.loads(answer.body)["errors"], served(logs)
    assert is_documented(503, "unavailable", error["message"])
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
        assert await kept[2].rest() == b"", "it was idle"
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
