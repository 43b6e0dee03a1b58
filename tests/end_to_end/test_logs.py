"""Logs: machine-readable lines without anything personal or secret, whatever the input."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

from aio_pika import Message
from aio_pika.abc import AbstractChannel

from service.api.openapi.examples import FULL_REQUEST
from service.authentication import api_keys
from service.postgres.pool import Connection
from tests.end_to_end.callers import client_of
from tests.end_to_end.events import publish_calculation
from tests.harness import queues
from tests.harness.endpoints import ENDPOINTS, Endpoint
from tests.harness.examples import A_REQUEST, CONVEYANCER, SECRET_KEYS
from tests.harness.issuer import Issuer
from tests.harness.processes import api_process, started, worker_process
from tests.harness.raw_connection import connect_to, head
from tests.harness.stored import ANY_TEXTS
from tests.harness.waiting import eventually
from worker.rabbitmq import topology

MARK = "zqmark"  # in every value that must not be logged
PHONE = "+44 7700 900123"
Options: TypeAlias = dict[str, Any]
Call: TypeAlias = tuple[str, str, Options]  # method, path, and what httpx sends

AN_EMAIL_ADDRESS = re.compile(r"[\w.+-]+@[\w-]+")

A_MARKED_REQUEST: dict[str, Any] = {
    **FULL_REQUEST,
    **{name: f"{MARK} {name}" for name in ANY_TEXTS},
    "customer_email": f"{MARK}-customer@customer.example.com",
    "customer_phone": PHONE,
    "sender_email": f"{MARK}-sender@firm.example.com",
    "property_value": 271_828_182,
    "meta_data": {f"{MARK} key": [f"{MARK} value", {"deep": f"{MARK} deep"}]},
}
_LOGGABLE = {"request_type", "meta_data", "calculation_fee_exempt"}  # or marked inside
BAD_VALUES: dict[str, Any] = {
    **dict.fromkeys(("property_value", "request_type", "meta_data", "calculation_fee_exempt"), MARK),
    f"{MARK}_unknown": MARK,
    "customer_email": f"{MARK} is no address",
    "customer_phone": MARK * 100,
    "customer_first_name": f"{MARK}\x00",
}


async def test_logs_of_the_api_hold_nothing_personal_or_secret(service_settings, issuer, database, tmp_path):
    verbose_api = api_process(service_settings, tmp_path, LOG_LEVEL="DEBUG")
    token = issuer.token()
    api_key = await api_keys.create(database, CONVEYANCER)
    async with started(verbose_api), client_of(verbose_api, token) as caller:
        created = await caller.post("/v1/request", json=A_MARKED_REQUEST)
        record = created.json()["data"]
        calls = [*calls_with_access(record, api_key), *calls_with_credentials(record, issuer)]
        seen = {
            (await caller.request(method, path, **options)).status_code for method, path, options in calls
        }
        async with refused_rows(database):
            seen.add((await caller.post("/v1/request", json=A_MARKED_REQUEST)).status_code)
        await database.execute(f"ALTER TABLE calculation_request RENAME customer_email TO {MARK}")
        seen.add((await caller.post("/v1/request", json=A_MARKED_REQUEST)).status_code)
        await database.execute(f"ALTER TABLE calculation_request RENAME {MARK} TO customer_email")
        malformed = f"GET /{MARK} HTTP/{MARK}\r\n\r\n".encode()
        interrupted = head(caller, f"Cookie: {MARK}", "Content-Length: 500") + f'{{"notes": "{MARK}'.encode()
        for sent in (malformed, interrupted):
            connection = await connect_to(caller)
            connection.send(sent)
            connection.hang_up()
        await verbose_api.becomes_ready()

    assert seen >= {200, 400, 401, 403, 404, 405, 413, 415, 422, 500}
    assert_lines_for_machines_with_nothing_to_hide(verbose_api.output, token, api_key, record["secret"])


def calls_with_access(record: dict[str, Any], api_key: str) -> list[Call]:
    """Return valid and invalid calls of every route, by callers who have access to it."""
    path = f"/v1/request/{record['uuid']}"
    secret = {"secret": f"{MARK}{record['secret']}"}
    calls: list[Call] = [
        ("PUT", path, {"json": A_MARKED_REQUEST, "params": secret}),
        ("DELETE", f"/v1/questionnaire/structure?secret={MARK}", {}),
        ("GET", f"/v1/request/req_{MARK.ljust(22, '0')}", {}),
        ("GET", f"/v1/request/{MARK}@customer.example.com", {"params": secret}),
        ("GET", f"/{MARK}/{record['secret']}", {"params": secret}),
        ("GET", f"/schema/openapi.json?{MARK}", {}),
    ]
    for endpoint in ENDPOINTS:
        names = [each["name"] for each in endpoint.operation["parameters"] if each.get("in") == "query"]
        headers = {"traceparent": MARK}
        if "api_key" in endpoint.schemes:
            headers["Authorization"] = f"Bearer {api_key}"
        sent: Options = {"params": dict.fromkeys(names, MARK) or secret, "headers": headers}
        bodies = bodies_of(endpoint) if endpoint.body else [{}]
        calls += [(endpoint.method, endpoint.at(record["uuid"]), sent | body) for body in bodies]
    return calls


def bodies_of(endpoint: Endpoint) -> list[Options]:
    """Return a valid body, and invalid ones, for an endpoint that takes one."""
    as_json = {"Content-Type": "application/json"}
    return [
        {"json": {name: A_MARKED_REQUEST.get(name, value) for name, value in endpoint.body.items()}},
        {"json": A_MARKED_REQUEST | BAD_VALUES},
        {"content": f'{{"notes": {MARK}', "headers": as_json},
        {"content": b'"' + MARK.encode() + b'\xff"', "headers": as_json},
        {"content": b"[" * 50_000, "headers": as_json},
        {"content": MARK, "headers": {"Content-Type": f"text/{MARK}"}},
        {"json": {"notes": MARK * 50_000}},
        {"json": A_MARKED_REQUEST, "headers": {"Idempotency-Key": f'"{MARK}'}},
    ]


def calls_with_credentials(record: dict[str, Any], issuer: Issuer) -> list[Call]:
    """Return calls with invalid credentials, and with the secret where it belongs and where it does not."""
    secret = record["secret"]
    claims: list[Options] = [{"aud": MARK}, {"iss": MARK}, {"scope": MARK}, {"client_id": MARK}, {"exp": 1}]
    claims += [{"headers": {"kid": MARK}}, {"headers": {"typ": MARK}}]
    bearers = [
        *(MARK, f"{MARK}.{MARK}.{MARK}", f"cr_{'0' * 12}_{MARK.ljust(43, '0')}", MARK.ljust(43, "0")),
        *(secret, secret[:-1], f"{secret}x", f"{secret}.{secret}.{secret}"),
        *[issuer.token(**each) for each in claims],
    ]
    uuids = (record["uuid"], "req_0000000000000000000000", secret)
    called = {(each.method, each.at(uuid), bool(each.body)) for each in ENDPOINTS for uuid in uuids}
    calls: list[Call] = [("GET", f"/v1/request/{secret}", {})]
    for authorization in (f"Basic {MARK}", *[f"Bearer {bearer}" for bearer in bearers]):
        options: Options = {"headers": {"Authorization": authorization, "Cookie": f"session={MARK}"}}
        for method, path, has_body in called:
            calls.append((method, path, options | ({"json": A_MARKED_REQUEST} if has_body else {})))
    return calls


async def test_logs_of_the_worker_hold_nothing_personal_or_secret(
    *, api, worker_settings, issuer, channel, subscriber, mail_server, database, tmp_path
):
    verbose_worker = worker_process(worker_settings, tmp_path, LOG_LEVEL="DEBUG")
    token = issuer.token()

    async def create() -> dict[str, Any]:
        record: dict[str, Any] = (await caller.post("/v1/request", json=A_MARKED_REQUEST)).json()["data"]
        secrets.append(record["secret"])
        return record

    async def gets(event_type: str) -> None:
        await eventually(lambda: event_type in subscriber.types(record["uuid"]))

    async def logs(part: str) -> None:
        await eventually(lambda: part in verbose_worker.output)

    secrets: list[str] = []
    async with started(api, verbose_worker), client_of(api, token) as caller:
        mail_server.data_reply = f"451 4.3.0 {MARK}-customer@customer.example.com: later"
        record = await create()
        await logs('"outcome":"postponed"')
        mail_server.data_reply = f"250 OK {MARK}-customer@customer.example.com"
        await gets("request.email_sent")

        mail_server.rcpt_reply = f"550 5.1.1 <{MARK}-customer@customer.example.com>: no such user"
        record = await create()
        await gets("request.email_failed")
        mail_server.rcpt_reply = "250 OK"

        record = await create()
        for calculation_id in ("calc-1", "calc-2"):
            await publish_calculation(channel, record["uuid"], calculation_id)
        await gets("request.calculated")
        await eventually(lambda: queues.holds(channel, topology.CALCULATION_RESULTS.dead_letters, 1))

        record = await create()
        await gets("request.email_sent")
        async with refused_rows(database):
            await publish_calculation(channel, record["uuid"], "calc-1")
            await logs("CheckViolationError")
        await gets("request.calculated")

        await poison_both_queues(channel)

    assert_lines_for_machines_with_nothing_to_hide(verbose_worker.output, token, *secrets)


@asynccontextmanager
async def refused_rows(database: Connection) -> AsyncIterator[None]:
    """Let Postgres refuse each request that is written: its message quotes all of the row."""
    await database.execute("ALTER TABLE calculation_request ADD CONSTRAINT none CHECK (false) NOT VALID")
    yield
    await database.execute("ALTER TABLE calculation_request DROP CONSTRAINT none")


async def poison_both_queues(channel: AbstractChannel) -> None:
    bodies = [
        MARK.encode(),
        b"\xff" + MARK.encode(),
        b"[" * 50_000,
        json.dumps({"request_uuid": MARK, "calculation_id": f"{MARK}@customer"}).encode(),
        json.dumps({"request_uuid": f"req_{MARK.ljust(22, '0')}", "calculation_id": PHONE}).encode(),
        json.dumps({"request_uuid": "req_" + "0" * 22, "calculation_id": f"{MARK} {PHONE}"}).encode(),
        json.dumps({"specversion": "1.0", "id": MARK, "source": MARK, "type": MARK, "data": MARK}).encode(),
    ]
    for queue in topology.QUEUES:
        for body in bodies:
            message = Message(
                body,
                message_id=f"{MARK}@customer.example.com",
                type=MARK,
                correlation_id=MARK,
                headers={"traceparent": MARK, MARK: MARK},
            )
            await channel.default_exchange.publish(message, queue.name)
        dead = len(bodies) + (queue is topology.CALCULATION_RESULTS)  # which has calc-2, too
        await eventually(partial(queues.holds, channel, queue.dead_letters, dead))


def assert_lines_for_machines_with_nothing_to_hide(output: str, *secrets: str) -> None:
    keys = [pair.partition(":")[2] for pair in SECRET_KEYS.split(",")]
    personal = [str(value) for name, value in A_MARKED_REQUEST.items() if name not in _LOGGABLE]
    personal += [MARK, PHONE.replace(" ", "")]
    assert output
    for line in output.splitlines():
        assert json.loads(line).keys() >= {"event", "level", "timestamp"}, line
        assert not AN_EMAIL_ADDRESS.search(line)
        line = re.sub('"timestamp":"[^"]*"', "", line)  # noqa: PLW2901 - a date of the request may be today
        for secret in (*keys, *personal, *secrets, *A_REQUEST.values()):
            assert secret not in line, f"{secret!r} in {line}"
