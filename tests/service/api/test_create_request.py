"""POST /v1/request. tests/service/contracts/test_openapi.py provokes each refusal."""

import asyncio
import re
from datetime import datetime

import msgspec
import pytest
from structlog.testing import capture_logs

from service.contracts.endpoints import FULL_REQUEST
from service.identifiers import parse_uuid, uuid_of
from tests.harness.examples import A_REQUEST, CONVEYANCER, FREE_CONVEYANCER
from tests.harness.metrics import rises
from tests.harness.stored import count_rows

WAIVER = {"calculation_fee_exempt": True, "calculation_fee_exempt_reason": "Repeat client"}


async def test_created_request_is_returned_as_the_interface_specifies(client):
    response = await client.post("/v1/request", json=FULL_REQUEST)

    assert response.status_code == 200
    body = response.json()
    assert body["status"] == {"code": 200, "message": "OK"}
    assert body["errors"] is None
    assert datetime.fromisoformat(body["meta"]["timestamp"]).utcoffset() is not None
    assert "." in body["meta"]["timestamp"]
    data = body["data"]
    assert {name: data.pop(name) for name in FULL_REQUEST} == FULL_REQUEST
    assert re.fullmatch(r"req_[0-9A-Za-z]{22}", data["uuid"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", data["created_at"])
    assert data.pop("updated_at") == data.pop("created_at")
    assert data.pop("calculation_id") is None
    secret, uuid = data.pop("secret"), data.pop("uuid")
    assert data == {
        "request_url": f"https://app.example.com/calculator/request/{uuid}?secret={secret}",
    }


async def test_omitted_fields_are_null(client):
    data = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]

    defaults = {"request_type": "SDLT_CALCULATION", "calculation_fee_exempt": False}
    expected = dict.fromkeys(FULL_REQUEST) | A_REQUEST | defaults
    assert {name: data[name] for name in FULL_REQUEST} == expected


async def test_request_and_event_are_stored_together_and_the_secret_is_not(client, database):
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    response = await client.post("/v1/request", json=FULL_REQUEST, headers={"traceparent": traceparent})

    created = response.json()["data"]
    (row,) = await database.fetch("SELECT * FROM outbox")
    assert (row["request_id"], row["type"], row["sequence"]) == (
        parse_uuid(created["uuid"]),
        "request.created",
        1,
    )
    assert row["traceparent"] == traceparent
    assert msgspec.json.decode(row["payload"]) == {
        "specversion": "1.0",
        "id": f"{created['uuid']}.request.created.1",
        "source": "/calculation-requests",
        "type": "request.created",
        "subject": created["uuid"],
        "time": created["created_at"],
        "datacontenttype": "application/json",
        "traceparent": traceparent,
        "data": {
            "uuid": created["uuid"],
            "tenant": CONVEYANCER,
            "sequence": 1,
            **{
                name: FULL_REQUEST[name]
                for name in ("request_type", "property_value", "calculation_fee_exempt", "external_id")
            },
        },
    }
    stored = await database.fetchval("SELECT string_agg(r::text, '') FROM calculation_request AS r")
    assert created["secret"] not in stored


@pytest.mark.parametrize("sent", [{}, {"traceparent": "00-ada@x-1-01"}], ids=["none", "malformed"])
async def test_without_a_usable_trace_context_the_event_begins_a_trace_that_is_not_sampled(
    client, database, sent
):
    for _ in range(2):
        response = await client.post("/v1/request", json=A_REQUEST, headers=sent)
        assert response.status_code == 200

    begun = [row["traceparent"] for row in await database.fetch("SELECT traceparent FROM outbox")]
    assert len(set(begun)) == 2
    assert all(re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", each) for each in begun)


async def test_request_is_not_stored_when_its_event_cannot_be_and_only_the_log_says_why(client, database):
    await database.execute("ALTER TABLE outbox ADD CHECK (payload IS NULL)")

    with (
        capture_logs() as logs,
        rises("http_request_duration_seconds_count", method="POST", route="/v1/request", status="500"),
    ):
        response = await client.post("/v1/request", json=A_REQUEST)

    assert response.status_code == 500
    assert response.json()["errors"][0]["code"] == "internal_error"
    assert await count_rows(database) == (0, 0)
    failure = next(line for line in logs if line["event"] == "request_failed")
    assert (failure["error"], failure["sqlstate"]) == ("CheckViolationError", "23514")
    assert "outbox" not in response.text
    assert "Ada" not in response.text + str(logs)


async def test_empty_optional_text_is_stored_as_null(client, database):
    empty = dict.fromkeys(("customer_phone", "notes", "external_id"), "")

    response = await client.post("/v1/request", json=A_REQUEST | empty)

    assert response.status_code == 200
    (row,) = await database.fetch("SELECT customer_phone, notes, external_id FROM calculation_request")
    assert dict(row) == dict.fromkeys(empty)
    payload = msgspec.json.decode(await database.fetchval("SELECT payload FROM outbox"))
    assert payload["data"]["external_id"] is None


def escaped(value: object) -> str:
    """Return *value* as JSON with every character of every text escaped, which is its longest form."""
    match value:
        case str():
            units = value.encode("utf-16-be").hex()
            return '"' + "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)) + '"'
        case dict():
            return "{" + ",".join(f"{escaped(name)}:{escaped(part)}" for name, part in value.items()) + "}"
    return msgspec.json.encode(value).decode()


async def test_body_with_every_field_at_its_limit_is_accepted_fully_escaped(client):
    house = "\U0001f3e0"  # two UTF-16 units, so twelve characters when escaped
    address = "a" * 64 + "@" + ".".join(["b" * 63, "c" * 63, "d" * 57]) + ".com"
    body = {
        **dict.fromkeys(A_REQUEST, house * 255),
        "customer_email": address,
        "sender_email": address,
        "customer_phone": house * 32,
        "request_type": "SDLT_CALCULATION",
        "property_value": 10**12,
        "notes": house * 10_000,
        "external_id": house * 255,
        "meta_data": {"a": "b" * (16 * 1024 - len('{"a":""}'))},
        "calculation_fee_exempt": True,
        "calculation_fee_exempt_reason": house * 500,
    }
    assert len(address) == 254

    response = await client.post(
        "/v1/request", content=escaped(body), headers={"Content-Type": "application/json"}
    )

    assert response.status_code == 200, response.text
    assert {name: response.json()["data"][name] for name in body} == body


async def test_concurrent_creates_are_each_answered_for_their_own_request(client, issuer, database):
    tenants = [CONVEYANCER, FREE_CONVEYANCER, "stranger"] * 10
    responses = await asyncio.gather(
        *(
            client.post(
                "/v1/request",
                json=A_REQUEST | (WAIVER if number % 2 else {}) | {"case_ref": f"case {number}"},
                headers={"Authorization": f"Bearer {issuer.token(tenant)}"},
            )
            for number, tenant in enumerate(tenants)
        )
    )

    answered = {}
    for number, (tenant, response) in enumerate(zip(tenants, responses, strict=True)):
        if tenant == "stranger":
            assert response.json()["errors"][0]["code"] == "unknown_conveyancer"
        else:
            assert response.json()["data"]["case_ref"] == f"case {number}"
            answered[response.json()["data"]["uuid"]] = (tenant, f"case {number}")
    rows = await database.fetch("SELECT id, conveyancer_id, case_ref FROM calculation_request")
    assert {uuid_of(row["id"]): (row["conveyancer_id"], row["case_ref"]) for row in rows} == answered
    assert await count_rows(database) == (20, 20)
