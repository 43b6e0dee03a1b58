"""Every route: paths, methods, errors, X-Request-Id and a line in the log. The questionnaire and its ETag."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import nullcontext
from functools import partial
from http import HTTPStatus
from typing import Any

import httpx
import msgspec
import pytest
from litestar.routes import HTTPRoute
from structlog.testing import capture_logs

from service.api.controllers.questionnaire import load
from service.api.outer_layer import OuterLayer
from service.app import create_app
from service.identifiers import new_request_id, uuid_of
from service.server.asgi import Receive, Response, Scope, Send
from service.server.limits import LARGEST_BODY, LONGEST_PATH
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER, STRUCTURE
from tests.harness.http import bearer, connect_to, head, lasting_headers
from tests.harness.in_process import api_and_probes, api_client, serve, served
from tests.harness.metrics import rises
from tests.harness.waiting import eventually

REQUEST_ID = "case-17.a_B"
JSON = {"Content-Type": "application/json"}


async def test_every_answer_and_its_log_line_carry_the_request_id(client, service_settings, issuer, database):
    etag = (await client.get(STRUCTURE)).headers["ETag"]
    unknown = uuid_of(new_request_id())
    a_path = f"/v1/request/{unknown}"
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
        403: ("GET", a_path, {"headers": bearer(issuer.token(scope=""))}),
        404: ("GET", a_path, {}),
        405: ("DELETE", a_path, {}),
        413: ("POST", "/v1/request", {"json": {"notes": "x" * LARGEST_BODY}}),
        415: ("POST", "/v1/request", {"content": b"{}", "headers": {"Content-Type": "text/plain"}}),
        422: ("POST", "/v1/request", {"json": {"notes": 1}}),
        500: ("POST", "/v1/request", {"json": A_REQUEST | {"case_ref": "impossible"}}),
        503: ("POST", "/v1/request", {"json": A_REQUEST | {"case_ref": "away"}}),
    }

    hurried = api_client(service_settings, issuer.token(), database_timeout_seconds=0.2)
    for expected, (method, path, options) in calls.items():
        headers = {**options.pop("headers", {}), "X-Request-Id": REQUEST_ID}
        async with hurried if expected == 503 else nullcontext(client) as asked:
            with capture_logs() as logs:
                response = await asked.request(method, path, headers=headers, **options)
                (line,) = await eventually(partial(served, logs))

        assert (response.status_code, line["status"]) == (expected, expected)
        assert response.headers.get_list("X-Request-Id") == [REQUEST_ID], expected
        assert (line.get("uuid") == unknown) == (path == a_path and method == "GET")
        assert ("Retry-After" in response.headers) == (expected == 503)
        if expected in {204, 304}:
            assert response.content == b""
            continue
        body = response.json()
        errors = body["errors"] or []
        assert (body["status"]["code"], bool(errors)) == (expected, expected != 200)
        assert set(line.get("error_codes", ())) == {error["code"] for error in errors}
        assert line.get("reason") == (errors[0]["message"] if expected == 401 else None)


@pytest.mark.parametrize("path", ["/schema", STRUCTURE, "/nonsense", "/v1/request/nonsense"])
async def test_head_is_get_without_its_body(shared_client, path):
    expected = await shared_client.get(path)
    with capture_logs() as logs:
        response = await shared_client.head(path)
        (line,) = await eventually(lambda: served(logs))

    assert (response.status_code, response.content) == (expected.status_code, b"")
    assert lasting_headers(response) == lasting_headers(expected)
    assert line["method"] == "HEAD"


async def test_options_and_405_list_the_methods(shared_client, service_settings):
    routes = [route for route in create_app(service_settings).routes if isinstance(route, HTTPRoute)]
    uuid = uuid_of(new_request_id())
    methods = {route.path.replace("{uuid:str}", uuid): {*route.methods} for route in routes}
    methods = {path: each | ({"HEAD"} if "GET" in each else set()) for path, each in methods.items()}

    assert methods["/v1/request"] == {"GET", "HEAD", "OPTIONS", "POST"}
    for path, expected in methods.items():
        asked = await shared_client.options(path)
        other = next(method for method in ("DELETE", "PUT", "TRACE") if method not in expected)
        refused = await shared_client.request(other, path)

        assert (asked.status_code, asked.content) == (204, b"")
        assert (refused.status_code, refused.json()["errors"][0]["code"]) == (405, "method_not_allowed")
        for response in (asked, refused):
            assert {*response.headers["Allow"].split(", ")} == expected


UNKNOWN = ("/livez", "/readyz", "/metrics", "//metrics", "/%6detrics", "/v1/%2e%2e/metrics", "/é%ff%00")


@pytest.mark.parametrize("path", ["/schema/é%2f", *UNKNOWN])
async def test_unknown_path_is_not_found_and_so_are_probes_and_metrics(shared_client, path):
    connection = await connect_to(shared_client)
    with capture_logs() as logs:
        connection.send(head(shared_client, line=f"GET {path} HTTP/1.1"))
        answer = await connection.answer()
        lines = await eventually(lambda: served(logs))

    assert answer.status == 404
    assert msgspec.json.decode(answer.body)["errors"][0]["code"] == "not_found"
    assert answer.headers["x-request-id"]
    assert [line["route"] for line in lines] == ["unmatched" if path in UNKNOWN else "/schema/{path}"]


async def test_request_id_is_kept_if_it_is_short_and_plain(shared_client):
    kept, replaced = ("x" * 128, "9a.b_c-D", "Za.b_c-D", "za.b_c-D"), ("_a", ".a", "-a", "x" * 129, "a b")
    for sent in (*kept, *replaced, "", "ada@example.com"):
        answered = (await shared_client.get("/", headers={"X-Request-Id": sent})).headers["X-Request-Id"]
        assert (answered == sent) == (sent in kept)
        assert answered


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


async def test_body_is_refused_if_it_grows_too_large_or_two_headers_declare_it_differently(shared_client):
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(257):
            yield b" " * 1024

    streamed = await shared_client.post("/v1/request", content=chunks(), headers=JSON)
    assert streamed.json()["errors"][0]["message"] == "The body is larger than 256 KiB: send less."

    (json,), text = JSON.items(), ("Content-Type", "text/plain")
    encodings = [("Content-Encoding", name) for name in ("identity", "gzip")]
    for headers in ([json, *encodings], [json, *encodings[::-1]], [json, text], [text, json]):
        refused = await shared_client.post("/v1/request", content=b"{}", headers=headers)
        assert refused.status_code == 415


@pytest.mark.parametrize(
    ("token", "path", "status"),
    [(None, "", 200), ("A" * 43, "/req_0000000000000000000000", 401)],
    ids=["one firm", "made-up secrets"],
)
async def test_busy_process_sheds_load_of_one_party(service_settings, issuer, database, token, path, status):
    """One firm takes half of the queue, and so do all callers with secrets together."""
    other_firm = bearer(issuer.token(FREE_CONVEYANCER))
    async with api_and_probes(
        service_settings, token or issuer.token(), database_pool_size=1, database_timeout_seconds=20.0
    ) as (client, probes):
        await probes.get("/readyz")
        await database.execute("BEGIN; LOCK TABLE calculation_request")
        waiting = [asyncio.create_task(client.get(f"/v1/request{path}")) for _ in range(18)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)  # One is refused, as 16 others wait.
        with rises("postgres_unavailable_total"):
            refused = await client.get(f"/v1/request{path}", headers={"X-Request-Id": REQUEST_ID})
        ready = await probes.get("/readyz")
        refused_create = await client.post("/v1/request", json=A_REQUEST)
        others = [
            asyncio.create_task(client.request(method, "/v1/request", json=A_REQUEST, headers=other_firm))
            for method in ["GET", "POST"] * 8
        ]
        await asyncio.wait(others, timeout=0.1)

        codes = (refused.status_code, refused_create.status_code, ready.status_code)
        assert codes == (503, 401 if token else 503, 200)
        assert (refused.headers["Retry-After"], refused.headers["X-Request-Id"]) == ("1", REQUEST_ID)
        assert refused.json()["errors"][0]["code"] == "unavailable"
        assert refused.elapsed.total_seconds() < 5  # 10 if it waits for the connection
        await database.execute("COMMIT")
        assert {response.status_code for response in await asyncio.gather(*waiting)} == {status, 503}
        assert {response.status_code for response in await asyncio.gather(*others)} == {200}


YES_NO = ["YES", "NO"]
OWNS_OTHER, LEASEHOLD = {"owns_other": "YES"}, {"is_leasehold": "YES"}
USES = ["RESIDENTIAL", "MIXED", "COMMERCIAL", "DEVELOPMENT"]
BUYERS = ["INDIVIDUAL", "COUPLE", "LIMITED_COMPANY", "CHARITY", "PENSION", "TRUST", "COUNCIL", "PARTNERSHIP"]

# interface.md, "The questions, in the order returned": ref, responseType, option values, conditions.
INTERFACE = [
    ("case_ref", "text", None, None),
    ("country", "radio_button", ["ENGLAND", "WALES", "SCOTLAND"], None),
    ("is_leasehold", "radio_button", YES_NO, None),
    ("lease_nature", "radio_button", ["NEW", "EXTENSION", "TAKEOVER"], LEASEHOLD),
    ("lease_type", "radio_button", ["RENT", "PREMIUM"], LEASEHOLD),
    ("lease_premium", "currency", None, LEASEHOLD | {"lease_type": "PREMIUM"}),
    ("lease_term", "number", None, LEASEHOLD | {"lease_type": "RENT"}),
    ("lease_rent_year_1", "currency", None, LEASEHOLD | {"lease_type": "RENT"}),
    ("property_value", "currency", None, {"is_leasehold": "NO"}),
    ("completion_date", "date", None, None),
    ("is_refinance", "radio_button", YES_NO, {"is_leasehold": "NO"}),
    ("buyer_type", "select", BUYERS, None),
    *((ref, "radio_button", YES_NO, None) for ref in ("ftb_relief", "owns_other")),
    ("selling_main_residence", "radio_button", YES_NO, OWNS_OTHER),
    ("all_purchasers_on_title", "radio_button", YES_NO, OWNS_OTHER | {"selling_main_residence": "YES"}),
    *((ref, "radio_button", YES_NO, None) for ref in ("replacing_pr", "uk_resident")),
    *((ref, "radio_button", USES, None) for ref in ("current_use", "intended_use")),
    ("is_dwelling", "radio_button", YES_NO, None),
    ("being_converted", "radio_button", YES_NO, {"is_dwelling": "NO"}),
    ("is_development", "radio_button", YES_NO, {"being_converted": "NO"}),
    *((ref, "radio_button", YES_NO, None) for ref in ("is_purchase", "has_annexes")),
    ("num_dwellings", "number", None, None),
    ("has_grounds", "radio_button", YES_NO, None),
]


def test_questions_are_those_of_the_interface_in_its_order_and_do_not_speak_to_the_buyer():
    table, texts = [], []
    for question in load().questionnaire:
        options = question.response_options
        values = options and [option.value for option in options]
        table.append((question.ref, question.response_type, values, question.conditions))
        texts += [question.question, question.info, *(option.name for option in options or ())]

    assert table == INTERFACE
    assert [text for text in texts if not text or text != text.strip()] == []
    assert [text for text in texts if re.search(r"\byou", text, re.IGNORECASE)] == []  # always "the buyer"


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        # Two headers are one list. The tag may be weak, and may name the encoding of a gateway.
        (304, ['"other"|{tag}', "*", "{tag}", "W/{tag}", 'W/"{bare}-gzip"', '"{bare}-br"']),
        (304, ['"other", W/"{bare};gzip"', '"a, b" ,W/"other",{tag}']),
        (200, ['"other"', 'W/"other", "another"', "", '"*"', '"x{bare}"', '"x", "-gzip"', "{bare}"]),
    ],
)
async def test_questions_that_the_caller_already_has_are_not_sent_again(shared_client, status, headers):
    first = (await shared_client.get(STRUCTURE)).headers
    weak, _, tag = first["ETag"].partition("/")
    assert (weak, first["Cache-Control"]) == ("W", "private, no-cache")
    for if_none_match in headers:
        sent = if_none_match.format(tag=tag, bare=tag.strip('"')).split("|")
        response = await shared_client.get(STRUCTURE, headers=[("If-None-Match", each) for each in sent])

        assert response.status_code == status, sent
        if status == 304:
            kept = {name: first[name] for name in ("etag", "cache-control")}
            assert (response.content, dict(lasting_headers(response))) == (b"", kept)
            with_tag = {"If-None-Match": sent[-1]} | bearer("no token")
            assert (await shared_client.get(STRUCTURE, headers=with_tag)).status_code == 401
