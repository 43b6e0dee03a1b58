"""Logs: machine-readable lines without anything personal or secret, whatever the input."""

import json
import re
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

from aio_pika import Message

from service.api.openapi.examples import FULL_REQUEST
from service.authentication import api_keys
from tests.end_to_end.parties import client_of, create, publish_calculation
from tests.harness.endpoints import ENDPOINTS, Endpoint
from tests.harness.examples import A_REQUEST, CONVEYANCER, SECRET_KEYS
from tests.harness.http import bearer, connect_to, head
from tests.harness.processes import api_process, started, worker_process
from tests.harness.queues import holds
from tests.harness.stored import ANY_TEXTS
from tests.harness.waiting import eventually
from worker.rabbitmq import topology

MARK = "zqmark"  # in every value that must not be logged
PHONE = "+44 7700 900123"
Options: TypeAlias = dict[str, Any]
Call: TypeAlias = tuple[str, str, Options]  # method, path, and what httpx sends

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
    api = api_process(service_settings, tmp_path, LOG_LEVEL="DEBUG")
    token, api_key = issuer.token(), await api_keys.create(database, CONVEYANCER)
    async with started(api), client_of(api, token) as caller:

        async def statuses(*calls: Call) -> set[int]:
            return {(await caller.request(method, path, **sent)).status_code for method, path, sent in calls}

        record = await create(caller, A_MARKED_REQUEST)
        seen = await statuses(*calls_with_access(record, api_key), *calls_with_credentials(record, issuer))
        valid = ("POST", "/v1/request", {"json": A_MARKED_REQUEST})
        async with refused_rows(database):
            seen |= await statuses(valid)
        await database.execute(f"ALTER TABLE calculation_request RENAME customer_email TO {MARK}")
        seen |= await statuses(valid)
        await database.execute(f"ALTER TABLE calculation_request RENAME {MARK} TO customer_email")
        malformed = f"GET /{MARK} HTTP/{MARK}\r\n\r\n".encode()
        interrupted = head(caller, f"Cookie: {MARK}", "Content-Length: 500") + f'{{"notes": "{MARK}'.encode()
        for sent in (malformed, interrupted):
            connection = await connect_to(caller)
            connection.send(sent)
            connection.hang_up()
        await api.becomes_ready()

    assert seen >= {200, 400, 401, 403, 404, 405, 413, 415, 422, 500}
    assert_lines_for_machines_with_nothing_to_hide(api.output, token, api_key, record["secret"])


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
        headers = {"traceparent": MARK} | (bearer(api_key) if "api_key" in endpoint.schemes else {})
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


def calls_with_credentials(record: dict[str, Any], issuer) -> list[Call]:
    """Return calls with invalid credentials, and with the secret where it belongs and where it does not."""
    secret = record["secret"]
    claims: list[Options] = [{"aud": MARK}, {"iss": MARK}, {"scope": MARK}, {"client_id": MARK}, {"exp": 1}]
    claims += [{"headers": {"kid": MARK}}, {"headers": {"typ": MARK}}]
    bearers = [
        *(MARK, f"{MARK}.{MARK}.{MARK}", f"cr_{'0' * 12}_{MARK.ljust(43, '0')}", MARK.ljust(43, "0")),
        *(secret, secret[:-1], f"{secret}x", f"{secret}.{secret}.{secret}"),
        *[issuer.token(**each) for each in claims],
    ]
    calls: list[Call] = [("GET", f"/v1/request/{secret}", {})]
    uuids = (record["uuid"], "req_0000000000000000000000", secret)
    for authorization in (f"Basic {MARK}", *[f"Bearer {each}" for each in bearers]):
        sent: Options = {"headers": {"Authorization": authorization, "Cookie": f"session={MARK}"}}
        for each in ENDPOINTS:
            options = sent | ({"json": A_MARKED_REQUEST} if each.body else {})
            calls += {each.at(uuid): (each.method, each.at(uuid), options) for uuid in uuids}.values()
    return calls


async def test_logs_of_the_worker_hold_nothing_personal_or_secret(
    *, api, caller, worker_settings, channel, subscriber, mail_server, database, tmp_path
):
    worker = worker_process(worker_settings, tmp_path, LOG_LEVEL="DEBUG")
    records = []

    async def create_one() -> str:
        records.append(await create(caller, A_MARKED_REQUEST))
        return str(records[-1]["uuid"])

    async def gets(event_type: str) -> None:
        await eventually(lambda: event_type in subscriber.types(records[-1]["uuid"]))

    async def logs(part: str) -> None:
        await eventually(lambda: part in worker.output)

    async with started(api, worker):
        mail_server.data_reply = f"451 4.3.0 {MARK}-customer@customer.example.com: later"
        await create_one()
        await logs('"outcome":"postponed"')
        mail_server.data_reply = f"250 OK {MARK}-customer@customer.example.com"
        await gets("request.email_sent")

        mail_server.rcpt_reply = f"550 5.1.1 <{MARK}-customer@customer.example.com>: no such user"
        await create_one()
        await gets("request.email_failed")
        mail_server.rcpt_reply = "250 OK"

        uuid = await create_one()
        for calculation_id in ("calc-1", "calc-2"):
            await publish_calculation(channel, uuid, calculation_id)
        await gets("request.calculated")
        await eventually(lambda: holds(channel, topology.CALCULATION_RESULTS.dead_letters, 1))

        uuid = await create_one()
        await gets("request.email_sent")
        async with refused_rows(database):
            await publish_calculation(channel, uuid, "calc-1")
            await logs("CheckViolationError")
        await gets("request.calculated")

        await poison_both_queues(channel)

    secrets = [record["secret"] for record in records]
    assert_lines_for_machines_with_nothing_to_hide(worker.output, *secrets)


@asynccontextmanager
async def refused_rows(database):
    """Let Postgres refuse each request that is written: its message quotes all of the row."""
    await database.execute("ALTER TABLE calculation_request ADD CONSTRAINT none CHECK (false) NOT VALID")
    yield
    await database.execute("ALTER TABLE calculation_request DROP CONSTRAINT none")


async def poison_both_queues(channel) -> None:
    bodies = [
        *(MARK.encode(), b"\xff" + MARK.encode(), b"[" * 50_000),
        json.dumps({"request_uuid": MARK, "calculation_id": f"{MARK}@customer"}).encode(),
        json.dumps({"request_uuid": f"req_{MARK.ljust(22, '0')}", "calculation_id": PHONE}).encode(),
        json.dumps({"request_uuid": "req_" + "0" * 22, "calculation_id": f"{MARK} {PHONE}"}).encode(),
        json.dumps({"specversion": "1.0", "id": MARK, "source": MARK, "type": MARK, "data": MARK}).encode(),
    ]
    marked: Options = {"message_id": f"{MARK}@customer.example.com", "type": MARK, "correlation_id": MARK}
    marked["headers"] = {"traceparent": MARK, MARK: MARK}
    for queue in topology.QUEUES:
        for body in bodies:
            await channel.default_exchange.publish(Message(body, **marked), queue.name)
        dead = len(bodies) + (queue is topology.CALCULATION_RESULTS)  # which has calc-2, too
        await eventually(partial(holds, channel, queue.dead_letters, dead))


def assert_lines_for_machines_with_nothing_to_hide(output: str, *secrets: str) -> None:
    keys = [pair.partition(":")[2] for pair in SECRET_KEYS.split(",")]
    personal = [str(value) for name, value in A_MARKED_REQUEST.items() if name not in _LOGGABLE]
    personal += [MARK, PHONE.replace(" ", "")]
    assert output
    for line in output.splitlines():
        assert json.loads(line).keys() >= {"event", "level", "timestamp"}, line
        assert not re.search(r"[\w.+-]+@[\w-]+", line), "an address of an e-mail"
        line = re.sub('"timestamp":"[^"]*"', "", line)  # noqa: PLW2901 - a date of the request may be today
        for secret in (*keys, *personal, *secrets, *A_REQUEST.values()):
            assert secret not in line, f"{secret!r} in {line}"
