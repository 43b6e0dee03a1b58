"""POST /v1/request, and its Idempotency-Key. test_openapi.py provokes each refusal."""

import asyncio
import re
import string
from datetime import datetime
from typing import Any

import msgspec
import pytest
from httpx import AsyncClient, Response
from structlog.testing import capture_logs

from service.api.bodies import CreateBody
from service.api.decoding import parse
from service.api.errors import ApiError
from service.api.idempotency_key_header import parse_key
from service.api.openapi.examples import FULL_REQUEST
from service.calculation_requests import conveyancers
from service.identifiers import parse_uuid
from service.outbox import waking
from service.outbox.events import RequestCreated
from tests.harness.examples import A_LARGEST_REQUEST, A_REQUEST, CONVEYANCER, FREE_CONVEYANCER
from tests.harness.http import bearer
from tests.harness.in_process import api_client, served
from tests.harness.metrics import rises
from tests.harness.stored import QUEUED, count_rows, holding

WAIVER = {"calculation_fee_exempt": True, "calculation_fee_exempt_reason": "Repeat client"}
FIRST = '{"notes":"é","meta_data":{"a":[1,{"b":2,"c":3}],"z":1}'  # after the required fields
# As the refusal of a malformed key describes it.
BARE = string.ascii_letters + string.digits + "-_"
QUOTED = "".join(map(chr, range(0x20, 0x7F))).replace('"', "").replace("\\", "")


async def post(client: AsyncClient, key: str | None, body: Any = A_REQUEST, **headers: str) -> Response:
    keyed = {"Idempotency-Key": key} if key else {}
    return await client.post("/v1/request", json=body, headers=keyed | headers)


def is_repeat(response: Response) -> bool:
    assert response.status_code == 200, response.text
    said = response.headers.get("Idempotent-Replayed")
    assert said in (None, "true")
    return said is not None


async def test_created_request_is_returned_as_the_interface_specifies(service_settings, issuer):
    sent = FULL_REQUEST | {"meta_data": {"z": 1, "a": 2, "m": 1e17}}
    app_url = "https://app.example.com/sdlt/"  # The link has no double slash.
    async with api_client(service_settings, issuer.token(), app_url=app_url) as client:
        response = await client.post("/v1/request", json=sent)
        read = await client.get(f"/v1/request/{response.json()['data']['uuid']}")

    created, shown = [each.text.partition(',"meta":')[0] for each in (response, read)]
    assert shown == created
    assert '"meta_data":{"z":1,"a":2,"m":1e17}' in shown
    body = response.json()
    data = body.pop("data")
    timestamp = body.pop("meta")["timestamp"]
    assert body == {"status": {"code": 200, "message": "OK"}, "errors": None}
    assert response.status_code == 200
    assert datetime.fromisoformat(timestamp).utcoffset() is not None
    assert "." in timestamp
    assert re.fullmatch(r"req_[0-9A-Za-z]{22}", data["uuid"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", data["created_at"])
    assert data == sent | {
        **{name: data[name] for name in ("uuid", "created_at", "secret")},
        "updated_at": data["created_at"],
        "calculation_id": None,
        "request_url": f"{app_url}calculator/request/{data['uuid']}?secret={data['secret']}",
    }


async def test_request_and_event_are_stored_together_and_the_secret_is_not(client, database):
    woken = asyncio.Event()
    await database.add_listener(waking.CHANNEL, lambda *_: woken.set())
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    response = await client.post("/v1/request", json=FULL_REQUEST, headers={"traceparent": traceparent})

    created = response.json()["data"]
    (row,) = await database.fetch(QUEUED)
    assert row[:4] == (parse_uuid(created["uuid"]), 1, "request.created", CONVEYANCER)
    assert row["traceparent"] == traceparent
    assert row["time"].strftime("%Y-%m-%dT%H:%M:%SZ") == created["created_at"]
    names = FULL_REQUEST.keys() & {*RequestCreated.__struct_fields__}
    own = {"uuid": created["uuid"], "tenant": CONVEYANCER, "sequence": 1}
    assert msgspec.json.decode(row["data"]) == {name: FULL_REQUEST[name] for name in names} | own
    stored = await database.fetchval("SELECT string_agg(r::text, '') FROM calculation_request AS r")
    assert created["secret"] not in stored
    await asyncio.wait_for(woken.wait(), 10)


async def test_postgres_rejects_nothing_that_passes_validation(service_settings, issuer, database):
    """Otherwise it would reject all creates of a group commit. tests/fuzz sends more bodies."""
    firm = "\U0001f3e0" * 255
    await database.execute("INSERT INTO conveyancer VALUES ($1, 'Longest', true)", firm)
    deepest = msgspec.json.decode("[" * 15 + "1" + "]" * 15)
    odd = {'\x01\x7f\uffff"\\': [2**63 - 1, -(2**63), -0.1, 5e-324]}
    bodies = [
        A_LARGEST_REQUEST,
        A_LARGEST_REQUEST | {"meta_data": {"deepest": deepest}},
        A_LARGEST_REQUEST | {"meta_data": odd, "notes": "\t\r\n\ufdd0"},
    ]

    async with api_client(service_settings, issuer.token(client_id=firm)) as client:
        answers = [await post(client, f"{number}" + "~" * 254, body) for number, body in enumerate(bodies)]

    assert [answer.status_code for answer in answers] == [200] * len(bodies), answers[-1].text
    stored = [answer.json()["data"]["meta_data"] for answer in answers]
    assert stored == [each["meta_data"] for each in bodies]


async def test_request_is_not_stored_when_its_event_cannot_be_and_only_the_log_says_why(client, database):
    await database.execute("ALTER TABLE outbox ADD CHECK (traceparent = '')")
    counted = "http_request_duration_seconds_count"

    with capture_logs() as logs, rises(counted, method="POST", route="/v1/request", status="500"):
        response = await post(client, None)

    assert (response.status_code, response.json()["errors"][0]["code"]) == (500, "internal_error")
    assert await count_rows(database) == (0, 0)
    failure = next(line for line in logs if line["event"] == "request_failed")
    assert (failure["error"], failure["sqlstate"]) == ("CheckViolationError", "23514")
    assert "outbox" not in response.text
    assert "Ada" not in response.text + str(logs)


async def test_repeat_returns_the_request_as_it_is_now_however_old_it_is(client, database):
    first = await post(client, "case-17")
    await database.execute("DELETE FROM outbox")  # delivered long ago
    await database.execute(
        "UPDATE calculation_request SET created_at = created_at - interval '10 years', calculation_id = 'c-1'"
    )
    again = await post(client, "case-17")
    changed = await post(client, "case-17", A_REQUEST | {"case_ref": "13 High Street"})

    assert (is_repeat(first), is_repeat(again), changed.status_code) == (False, True, 422)
    before, now = first.json()["data"], again.json()["data"]
    assert now == before | {"calculation_id": "c-1", "created_at": now["created_at"]}
    assert again.json()["errors"] is None
    assert await count_rows(database) == (1, 0)


@pytest.mark.parametrize(
    ("again", "is_the_same"),
    [
        ('{"meta_data" : {"z":1 ,"a":[1,{"c":3,"b":2}]},\n"notes":"\\u00e9"', True),
        ('{"notes":"é","meta_data":{"a":[1,{"b":2,"c":3}],"z":1},"external_id":null', True),
        (f'{FIRST},"request_type":"SDLT_CALCULATION","calculation_fee_exempt":false', True),
        (f'{FIRST},"calculation_fee_exempt_reason":"ignored"', True),
        (f'{FIRST},"calculation_fee_exempt":true,"calculation_fee_exempt_reason":"a"', False),
        (f'{FIRST},"property_value":0', False),
        (f'{FIRST},"property_value":null,"calculation_fee_exempt_reason":{{"a":[1]}}', True),
        (f'{FIRST},"property_value":0.0', False),
        (FIRST.replace('[1,{"b":2,"c":3}]', '[{"b":2,"c":3},1]'), False),
        (FIRST.replace('"b":2', '"b":2.0'), False),  # returned as it was sent
        (FIRST.replace("é", "e\\u0301"), False),  # stored as it was sent
    ],
)
def test_bodies_are_the_same_if_they_are_stored_alike_but_for_the_order_of_names(again, is_the_same):
    fields = msgspec.json.encode(A_REQUEST).decode()
    first, second = [parse(CreateBody, f"{fields[:-1]},{body[1:]}}}".encode()) for body in (FIRST, again)]

    assert (first.idempotency("k") == second.idempotency("k")) == is_the_same
    stored, other = [body.validated(waiver_applies=False) | {"meta_data": None} for body in (first, second)]
    assert (stored == other) >= is_the_same


async def test_firms_may_use_one_key_and_each_gets_its_own_request_again(client, issuer):
    firms = [bearer(issuer.token(firm)) for firm in (CONVEYANCER, FREE_CONVEYANCER)]
    first = [(await post(client, "case-17", **firm)).json()["data"]["uuid"] for firm in firms]
    again = [(await post(client, "case-17", **firm)).json()["data"]["uuid"] for firm in firms]

    assert (again, len({*first})) == (first, 2)


@pytest.mark.parametrize(("conveyancer", "charges"), [(CONVEYANCER, False), (FREE_CONVEYANCER, True)])
async def test_waiver_is_repeated_after_the_fee_changed(client, issuer, database, conveyancer, charges):
    headers = bearer(issuer.token(conveyancer))
    first = await post(client, "k", A_REQUEST | WAIVER, **headers)
    await conveyancers.register(database, conveyancer, name="Changed", charges_calculation_fee=charges)

    repeat = await post(client, "k", A_REQUEST | WAIVER, **headers)
    other_reason = A_REQUEST | WAIVER | {"calculation_fee_exempt_reason": "Mistake"}
    changed = await post(client, "k", other_reason, **headers)

    assert is_repeat(repeat)
    assert repeat.json()["data"] == first.json()["data"]
    assert first.json()["data"]["calculation_fee_exempt"] is not charges
    assert changed.json()["errors"][0]["code"] == "idempotency_key_reused"
    assert await count_rows(database) == (1, 1)


def test_key_may_be_a_token_or_a_string():
    for token in (BARE, "*tchar!#$%&'*+-.^_`|~:/9", "x" * 255):
        assert parse_key([f" \t{token}\t"]) == token
    for string_ in (QUOTED, " " * 255):
        assert parse_key([f'"{string_}"']) == string_


@pytest.mark.parametrize(
    "key",
    [
        *("", '""', '"', '"open', 'open"', '"a"b"', '"a\\b"', '"a\\"b"', '"a", "b"', '"a";version=1'),
        *(
            "two words",
            "a,b",
            "a=b",
            "ab==",
            "a@b",
            "order(7)",
            "{6F9619FF}",
            "é",
            '"é"',
            '"a\tb"',
            "k" * 256,
        ),
    ],
)
def test_malformed_key_is_refused_and_so_are_two(key):
    with pytest.raises(ApiError, match="in double quotes" if len(key) < 256 else "send 1 to 255 ASCII"):
        parse_key([key])
    with pytest.raises(ApiError, match="more than one"):
        parse_key(["k", key])


async def test_refused_create_is_logged_without_a_uuid_and_its_key_is_free(client, issuer, database_url):
    await post(client, "used")
    invalid = await post(client, "busy", A_REQUEST | {"customer_email": "nobody"})
    async with holding(database_url, parse(CreateBody, msgspec.json.encode(A_REQUEST)).idempotency("busy")):
        with capture_logs() as logs:
            reused = await post(client, "used", A_REQUEST | WAIVER)
            in_flight = await post(client, "busy")
            stranger = await post(client, None, **bearer(issuer.token("stranger")))

    assert [each.status_code for each in (invalid, reused, in_flight, stranger)] == [422, 422, 409, 403]
    assert [line.get("uuid") for line in served(logs)] == [None] * 3
    assert (in_flight.headers["Retry-After"], in_flight.json()["data"]) == ("1", None)
    assert in_flight.json()["errors"][0]["code"] == "idempotency_key_in_flight"
    assert not is_repeat(await post(client, "busy"))
