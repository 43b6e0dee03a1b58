"""Idempotency-Key of POST /v1/request: a repeat with the same key and body returns the first request."""

import string
from typing import Any

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from service.api.bodies import CreateBody
from service.api.decoding import parse
from service.api.errors import ApiError
from service.api.idempotency_key_header import parse_key
from service.calculation_requests import conveyancers
from tests.harness.examples import A_REQUEST, CONVEYANCER, FREE_CONVEYANCER
from tests.harness.http import bearer
from tests.harness.in_process import served
from tests.harness.stored import count_rows, holding

WAIVER = {"calculation_fee_exempt": True, "calculation_fee_exempt_reason": "Repeat client"}
FIRST = '{"notes":"é","meta_data":{"a":[1,{"b":2,"c":3}],"z":1}'  # after the required fields


async def post(
    client: httpx.AsyncClient, key: str | None, body: Any = A_REQUEST, **headers: str
) -> httpx.Response:
    keyed = {"Idempotency-Key": key} if key else {}
    return await client.post("/v1/request", json=body, headers=keyed | headers)


def is_repeat(response: httpx.Response) -> bool:
    assert response.status_code == 200, response.text
    said = response.headers.get("Idempotent-Replayed")
    assert said in (None, "true")
    return said is not None


async def test_repeat_returns_the_request_as_it_is_now_however_old_it_is(client, database):
    first = await post(client, "case-17")
    await database.execute("DELETE FROM outbox")  # delivered long ago
    await database.execute(
        "UPDATE calculation_request SET created_at = created_at - interval '10 years', calculation_id = 'c-1'"
    )
    again = await post(client, "case-17")
    changed = await post(client, "case-17", A_REQUEST | {"case_ref": "13 High Street"})

    assert (is_repeat(first), is_repeat(again)) == (False, True)
    before, now = first.json()["data"], again.json()["data"]
    assert now == before | {"calculation_id": "c-1", "created_at": now["created_at"]}
    assert again.json()["errors"] is None
    assert changed.status_code == 422
    assert await count_rows(database) == (1, 0)


async def test_firms_may_use_one_key_and_each_gets_its_own_request_again(client, issuer):
    firms = [bearer(issuer.token(firm)) for firm in (CONVEYANCER, FREE_CONVEYANCER)]
    first = [(await post(client, "case-17", **firm)).json()["data"]["uuid"] for firm in firms]
    again = [(await post(client, "case-17", **firm)).json()["data"]["uuid"] for firm in firms]

    assert first == again
    assert first[0] != first[1]


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
    bodies = [f"{fields[:-1]},{body[1:]}}}".encode() for body in (FIRST, again)]
    first, second = [parse(CreateBody, body) for body in bodies]

    assert (first.idempotency("k") == second.idempotency("k")) == is_the_same
    stored, other = [body.validated(waiver_applies=False) | {"meta_data": None} for body in (first, second)]
    assert (stored == other) >= is_the_same


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


BARE = string.ascii_letters + string.digits + "-_"
QUOTED = "".join(map(chr, range(0x20, 0x7F))).replace('"', "").replace("\\", "")


@pytest.mark.parametrize(
    ("sent", "key"),
    [
        (BARE, BARE),  # as the refusal of a malformed key describes it
        (f'"{QUOTED}"', QUOTED),  # likewise
        ("*tchar!#$%&'*+-.^_`|~:/9", "*tchar!#$%&'*+-.^_`|~:/9"),
        (f" \t{'x' * 255}\t", "x" * 255),
        (f'"{" " * 255}"', " " * 255),
    ],
)
def test_key_may_be_a_token_or_a_string(sent, key):
    assert parse_key([sent]) == key


@pytest.mark.parametrize(
    "key",
    [
        *("", '""', '"', '"open', 'open"', '"a"b"', '"a\\b"', '"a\\"b"', '"a", "b"', '"a";version=1'),
        *("two words", "a,b", "a=b", "ab==", "a@b", "order(7)", "{6F9619FF}", "é", '"é"', '"a\tb"'),
    ],
)
def test_malformed_key_is_refused_and_its_caller_told_to_quote_it(key):
    with pytest.raises(ApiError, match="in double quotes"):
        parse_key([key])


def test_too_long_key_is_malformed_and_two_keys_are_refused_as_two():
    with pytest.raises(ApiError, match="send 1 to 255 ASCII"):
        parse_key(["k" * 256])
    with pytest.raises(ApiError, match="more than one"):
        parse_key(["k", "k"])


async def test_refused_create_is_logged_without_a_uuid_and_its_key_is_free(client, issuer, database_url):
    await post(client, "used")
    invalid = await post(client, "busy", A_REQUEST | {"customer_email": "nobody"})
    async with holding(database_url, parse(CreateBody, msgspec.json.encode(A_REQUEST)).idempotency("busy")):
        with capture_logs() as logs:
            reused = await post(client, "used", A_REQUEST | WAIVER)
            in_flight = await post(client, "busy")
            stranger = await post(client, None, **bearer(issuer.token("stranger")))

    assert [each.status_code for each in (invalid, reused, in_flight, stranger)] == [422, 422, 409, 403]
    assert served_uuids(logs) == [None] * 3
    assert in_flight.headers["Retry-After"] == "1"
    assert in_flight.json()["data"] is None
    assert in_flight.json()["errors"][0]["code"] == "idempotency_key_in_flight"
    assert not is_repeat(await post(client, "busy"))


def served_uuids(logs: list[EventDict]) -> list[str | None]:
    return [line.get("uuid") for line in served(logs)]
