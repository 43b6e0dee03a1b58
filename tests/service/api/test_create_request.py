"""POST /v1/request."""

import asyncio
import re
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec
import pytest

from service.identifiers import parse_uuid, uuid_of
from service.postgres.pool import Connection
from service.settings import ServiceSettings
from tests.harness.examples import A_REQUEST, CONVEYANCER, FREE_CONVEYANCER
from tests.harness.in_process import api_client
from tests.harness.issuer import Issuer

JSON = {"Content-Type": "application/json"}
WAIVER = {"calculation_fee_exempt": True, "calculation_fee_exempt_reason": "Repeat client"}
OPTIONAL = {
    "customer_phone": "+44 20 7946 0000",
    "request_type": "SDLT_CALCULATION",
    "property_value": 300_000,
    "notes": "Line one\nline two",
    "external_id": "crm-17",
    "meta_data": {"source": "website", "nested": {"zeta": [1, 2.5, None, True], "alpha": "é"}},
    **WAIVER,
}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in A_REQUEST.items() if key != name}


def reasons(response: httpx.Response) -> set[tuple[str, str]]:
    """Return (field, code) of every error."""
    return {(error["field"], error["code"]) for error in response.json()["errors"]}


async def nothing_is_stored(database: Connection) -> bool:
    counts = await database.fetchrow(
        "SELECT (SELECT count(*) FROM calculation_request) + (SELECT count(*) FROM outbox) AS rows"
    )
    return counts is not None and counts["rows"] == 0


async def test_created_request_is_returned_as_the_interface_specifies(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/request", json={**A_REQUEST, **OPTIONAL})

    assert response.status_code == 200
    body = response.json()
    assert body["status"] == {"code": 200, "message": "OK"}
    assert body["errors"] is None
    assert datetime.fromisoformat(body["meta"]["timestamp"]).utcoffset() is not None
    assert "." in body["meta"]["timestamp"]
    data = body["data"]
    assert {name: data.pop(name) for name in [*A_REQUEST, *OPTIONAL]} == {**A_REQUEST, **OPTIONAL}
    assert re.fullmatch(r"req_[0-9A-Za-z]{22}", data["uuid"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", data["created_at"])
    assert data.pop("updated_at") == data.pop("created_at")
    assert data.pop("calculation_id") is None
    secret, uuid = data.pop("secret"), data.pop("uuid")
    assert data == {
        "request_url": f"https://app.example.com/calculator/request/{uuid}?secret={secret}",
    }


async def test_omitted_fields_are_null(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/request", json=A_REQUEST)

    data = response.json()["data"]
    assert data["request_type"] == "SDLT_CALCULATION"
    assert data["calculation_fee_exempt"] is False
    for name in OPTIONAL.keys() - {"request_type", "calculation_fee_exempt"}:
        assert data[name] is None


async def test_meta_data_keeps_the_order_of_its_keys(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/request", json={**A_REQUEST, "meta_data": {"z": 1, "a": 2, "m": 1e17}})
    uuid = response.json()["data"]["uuid"]

    retrieved = await client.get(f"/v1/request/{uuid}")

    assert '"meta_data":{"z":1,"a":2,"m":1e17}' in retrieved.text


async def test_request_and_event_are_stored_together(client: httpx.AsyncClient, database: Connection) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    response = await client.post(
        "/v1/request", json={**A_REQUEST, **OPTIONAL}, headers={"traceparent": traceparent}
    )

    uuid = response.json()["data"]["uuid"]
    row = await database.fetchrow("SELECT * FROM outbox")
    assert row is not None
    assert (row["request_id"], row["type"], row["sequence"]) == (parse_uuid(uuid), "request.created", 1)
    assert row["traceparent"] == traceparent
    assert msgspec.json.decode(row["payload"]) == {
        "specversion": "1.0",
        "id": f"{uuid}.request.created.1",
        "source": "/calculation-requests",
        "type": "request.created",
        "subject": uuid,
        "time": response.json()["data"]["created_at"],
        "datacontenttype": "application/json",
        "traceparent": traceparent,
        "data": {
            "uuid": uuid,
            "tenant": CONVEYANCER,
            "request_type": "SDLT_CALCULATION",
            "property_value": 300_000,
            "calculation_fee_exempt": True,
            "external_id": "crm-17",
            "sequence": 1,
        },
    }


async def test_event_has_no_personal_data_and_no_secret(
    client: httpx.AsyncClient, database: Connection
) -> None:
    response = await client.post("/v1/request", json={**A_REQUEST, **OPTIONAL})

    payload = (await database.fetchval("SELECT payload FROM outbox")).decode()
    data = response.json()["data"]
    private = data.keys() - {
        "uuid", "created_at", "updated_at", "request_type", "property_value", "external_id",
        "calculation_fee_exempt", "calculation_id",
    }  # fmt: skip
    assert not [name for name in private if str(data[name]) in payload]


async def test_secret_is_not_stored(client: httpx.AsyncClient, database: Connection) -> None:
    response = await client.post("/v1/request", json=A_REQUEST)

    stored = await database.fetchval("SELECT string_agg(r::text, '') FROM calculation_request AS r")
    assert response.json()["data"]["secret"] not in stored


@pytest.mark.parametrize("sent", [{}, {"traceparent": "00-ada@x-1-01"}], ids=["none", "malformed"])
async def test_without_a_usable_trace_context_the_event_begins_a_trace_that_is_not_sampled(
    client: httpx.AsyncClient, database: Connection, sent: dict[str, str]
) -> None:
    for _ in range(2):
        response = await client.post("/v1/request", json=A_REQUEST, headers=sent)
        assert response.status_code == 200

    begun = [row["traceparent"] for row in await database.fetch("SELECT traceparent FROM outbox")]
    assert len(set(begun)) == 2
    assert all(re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", each) for each in begun)


async def test_request_is_not_stored_when_its_event_cannot_be(
    client: httpx.AsyncClient, database: Connection
) -> None:
    await database.execute("ALTER TABLE outbox ADD CHECK (false)")

    response = await client.post("/v1/request", json=A_REQUEST)

    assert response.status_code == 500
    assert response.json()["errors"][0]["code"] == "internal_error"
    assert "outbox" not in response.text
    assert await nothing_is_stored(database)


@pytest.mark.parametrize("name", A_REQUEST)
async def test_missing_field_is_refused(
    shared_client: httpx.AsyncClient, shared_database: Connection, name: str
) -> None:
    response = await shared_client.post("/v1/request", json=without(name))

    assert response.status_code == 422
    assert response.json()["data"] is None
    assert response.json()["errors"] == [
        {"code": "required", "message": "This field is required.", "field": name, "pointer": f"/{name}"}
    ]
    assert await nothing_is_stored(shared_database)


@pytest.mark.parametrize("name", A_REQUEST)
async def test_blank_field_is_refused(
    shared_client: httpx.AsyncClient, shared_database: Connection, name: str
) -> None:
    response = await shared_client.post("/v1/request", json={**A_REQUEST, name: " \u2003 "})

    assert response.status_code == 422
    assert reasons(response) == {(name, "blank")}
    assert await nothing_is_stored(shared_database)


async def test_name_without_a_visible_character_is_blank(shared_client: httpx.AsyncClient) -> None:
    names = [name for name in A_REQUEST if not name.endswith("_email")]
    for invisible in (
        *("\u200b", "\u3164", "\u2800", "\u00ad", "\u2060", "\ufe0f", "\U000e0100", "\U000e0041"),
        *("\u0301", "\u20dd", "\u115f", "\uffa0", "\ufeff", "\u034f", "\u180e", "\ufff9"),
        *("\u200d\u200c", " \u200b\u3000\u0301"),
    ):
        waiver = {"calculation_fee_exempt": True, "calculation_fee_exempt_reason": invisible}
        response = await shared_client.post(
            "/v1/request", json={**A_REQUEST, **dict.fromkeys(names, invisible), **waiver}
        )

        assert response.status_code == 422, ascii(invisible)
        assert reasons(response) == {(name, "blank") for name in [*names, "calculation_fee_exempt_reason"]}


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("property_value", "300000", "invalid_type"),
        ("property_value", 300_000.5, "invalid_type"),
        ("property_value", True, "invalid_type"),
        ("property_value", -1, "out_of_range"),
        ("property_value", 10**12 + 1, "out_of_range"),
        ("property_value", 10**30, "out_of_range"),
        ("calculation_fee_exempt", 1, "invalid_type"),
        ("calculation_fee_exempt", "true", "invalid_type"),
        ("calculation_fee_exempt", None, "invalid_type"),
        ("customer_first_name", 7, "invalid_type"),
        ("customer_first_name", None, "invalid_type"),
        ("customer_phone", 441632960000, "invalid_type"),
        ("request_type", "LTT_CALCULATION", "invalid_choice"),
        ("meta_data", [1], "invalid_type"),
        ("meta_data", "x", "invalid_type"),
        ("notes", {}, "invalid_type"),
        ("customer_email", "not an address", "invalid_email"),
        ("customer_email", "ada@", "invalid_email"),
        ("customer_email", "Ada <ada@example.com>", "invalid_email"),
        ("customer_email", "ada@example.com,eve@example.com", "invalid_email"),
        ("customer_email", "ada@example.com eve@example.com", "invalid_email"),
        ("sender_email", "grace@example.com;eve@example.com", "invalid_email"),
        ("customer_email", "ada@example.com\r\nBcc: eve@example.com", "invalid_characters"),
        ("customer_last_name", "Love\x00lace", "invalid_characters"),
        ("customer_last_name", "Love\x1blace", "invalid_characters"),
        ("customer_last_name", "Love\nlace", "invalid_characters"),
        ("customer_last_name", "Love\x85lace", "invalid_characters"),
        ("case_ref", "12\u2028High Street", "invalid_characters"),
        ("case_ref", "12\u202eHigh Street", "invalid_characters"),
        ("external_id", "crm\t17", "invalid_characters"),
        ("customer_phone", "1\n2", "invalid_characters"),
        ("notes", "a\x00b", "invalid_characters"),
        ("meta_data", {"a\x00b": 1}, "invalid_characters"),
        ("meta_data", {"a": [{"b": "\x00"}]}, "invalid_characters"),
        ("meta_data", {"a": 2**63}, "out_of_range"),
        ("meta_data", {"a": [-1e300]}, "out_of_range"),
        ("meta_data", {"a": "x" * 16_400}, "too_long"),
        ("customer_first_name", "x" * 256, "too_long"),
        ("sender_organization_name", "x" * 256, "too_long"),
        ("case_ref", "x" * 256, "too_long"),
        ("external_id", "x" * 256, "too_long"),
        ("customer_phone", "1" * 33, "too_long"),
        ("customer_email", "a" * 250 + "@x.co", "too_long"),
        ("notes", "x" * 10_001, "too_long"),
        ("calculation_fee_exampt", True, "unknown_field"),
        ("a/b~c", 1, "unknown_field"),
    ],
)
async def test_bad_value_is_refused(
    shared_client: httpx.AsyncClient, shared_database: Connection, name: str, value: object, code: str
) -> None:
    response = await shared_client.post(
        "/v1/request", content=msgspec.json.encode({**A_REQUEST, name: value}), headers=JSON
    )

    assert response.status_code == 422
    assert reasons(response) == {(name, code)}
    assert await nothing_is_stored(shared_database)


async def test_pointer_is_escaped_as_rfc_6901_requires(shared_client: httpx.AsyncClient) -> None:
    response = await shared_client.post("/v1/request", json={**A_REQUEST, "a/b~c": 1})

    assert response.json()["errors"][0]["pointer"] == "/a~1b~0c"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("customer_last_name", "O'Brien-Łódź 山田"),
        ("customer_last_name", "x" * 255),
        ("notes", "Tabs\tand\r\nlines"),
        ("notes", "x" * 10_000),
        ("property_value", 0),
        ("property_value", 10**12),
        ("customer_phone", None),
        ("customer_phone", "1" * 32),
        ("meta_data", {}),
        ("meta_data", {"a": 2**63 - 1, "b": -(2**63)}),
        ("customer_email", "ada+tag@sub.customer.example.com"),
        ("customer_email", "ada@bücher.example.com"),
    ],
)
async def test_good_value_is_stored_unchanged(client: httpx.AsyncClient, name: str, value: object) -> None:
    response = await client.post("/v1/request", json={**A_REQUEST, name: value})

    assert response.status_code == 200, response.text
    assert response.json()["data"][name] == value


async def test_empty_optional_text_is_stored_as_null(client: httpx.AsyncClient, database: Connection) -> None:
    empty = {"customer_phone": "", "notes": "", "external_id": ""}

    response = await client.post("/v1/request", json={**A_REQUEST, **empty})

    assert response.status_code == 200
    assert {name: response.json()["data"][name] for name in empty} == dict.fromkeys(empty)
    row = await database.fetchrow("SELECT customer_phone, notes, external_id FROM calculation_request")
    assert row is not None
    assert dict(row) == dict.fromkeys(empty)
    payload = msgspec.json.decode(await database.fetchval("SELECT payload FROM outbox"))
    assert payload["data"]["external_id"] is None


async def test_invisible_characters_are_accepted_beside_visible_ones(client: httpx.AsyncClient) -> None:
    names = {
        "customer_first_name": "\u0646\u06cc\u200c\u0645\u0627",  # Persian, with a joiner
        "customer_last_name": "\u0dc1\u0dca\u200d\u0dbb\u0dd3",  # Sinhala, with a joiner
        "sender_first_name": "e\u0301",
        "sender_last_name": "\u845b\U000e0100",  # a variation selector
        "sender_organization_name": "\ue000",  # private use
        "case_ref": "\U0001f3e0\ufe0f",
        "customer_phone": "ask Grace, 9 to 5",
        "external_id": "\u200b",
    }

    response = await client.post("/v1/request", json={**A_REQUEST, **names})

    assert response.status_code == 200, response.text
    assert {name: response.json()["data"][name] for name in names} == names


async def test_integral_number_is_accepted_as_an_integer_in_any_notation(client: httpx.AsyncClient) -> None:
    numbers = b', "property_value": 3.0e5, "meta_data": {"a": 300000.0}}'
    body = msgspec.json.encode(A_REQUEST).removesuffix(b"}") + numbers

    response = await client.post("/v1/request", content=body, headers=JSON)

    assert '"property_value":300000,' in response.text
    assert '"meta_data":{"a":300000.0}' in response.text


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


async def test_meta_data_may_have_at_most_sixteen_levels(client: httpx.AsyncClient) -> None:
    deepest = await client.post("/v1/request", json={**A_REQUEST, "meta_data": nested(16)})
    too_deep = await client.post("/v1/request", json={**A_REQUEST, "meta_data": nested(17)})

    assert deepest.status_code == 200
    assert reasons(too_deep) == {("meta_data", "too_deep")}


async def test_every_failing_field_is_reported_at_once(
    shared_client: httpx.AsyncClient, shared_database: Connection
) -> None:
    response = await shared_client.post(
        "/v1/request",
        json={
            **without("case_ref"),
            "customer_email": "nobody",
            "customer_first_name": " ",
            "property_value": "1",
            "nonsense": 1,
            "calculation_fee_exempt": True,
        },
    )

    assert reasons(response) == {
        ("case_ref", "required"),
        ("customer_email", "invalid_email"),
        ("customer_first_name", "blank"),
        ("property_value", "invalid_type"),
        ("nonsense", "unknown_field"),
        ("calculation_fee_exempt_reason", "required"),
    }
    assert await nothing_is_stored(shared_database)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (None, "required"),
        ("", "blank"),
        (" ", "blank"),
        ("x" * 501, "too_long"),
        (7, "invalid_type"),
        ("a\x00", "invalid_characters"),
    ],
)
async def test_waiver_needs_a_reason(
    shared_client: httpx.AsyncClient, shared_database: Connection, reason: object, code: str
) -> None:
    response = await shared_client.post(
        "/v1/request",
        json={**A_REQUEST, "calculation_fee_exempt": True, "calculation_fee_exempt_reason": reason},
    )

    assert response.status_code == 422
    assert reasons(response) == {("calculation_fee_exempt_reason", code)}
    assert await nothing_is_stored(shared_database)


async def test_reason_may_have_five_hundred_characters(client: httpx.AsyncClient) -> None:
    response = await client.post(
        "/v1/request",
        json={**A_REQUEST, "calculation_fee_exempt": True, "calculation_fee_exempt_reason": "é" * 500},
    )

    assert response.json()["data"]["calculation_fee_exempt_reason"] == "é" * 500


@pytest.mark.parametrize("reason", ["not needed", "x" * 501, 7, None])
async def test_reason_without_a_waiver_is_ignored(client: httpx.AsyncClient, reason: object) -> None:
    response = await client.post("/v1/request", json={**A_REQUEST, "calculation_fee_exempt_reason": reason})

    assert response.status_code == 200
    assert response.json()["data"]["calculation_fee_exempt"] is False
    assert response.json()["data"]["calculation_fee_exempt_reason"] is None


@pytest.mark.parametrize("reason", ["kindness", None, "x" * 501])
async def test_waiver_is_ignored_when_the_conveyancer_charges_no_fee(
    client: httpx.AsyncClient, issuer: Issuer, reason: object
) -> None:
    response = await client.post(
        "/v1/request",
        json={**A_REQUEST, "calculation_fee_exempt": True, "calculation_fee_exempt_reason": reason},
        headers={"Authorization": f"Bearer {issuer.token(FREE_CONVEYANCER)}"},
    )

    assert response.status_code == 200
    assert response.json()["data"]["calculation_fee_exempt"] is False
    assert response.json()["data"]["calculation_fee_exempt_reason"] is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"a":1}}',
        b"not json",
        b'{"a":"\xff\xfe"}',
        b'{"customer_email":7,',
        b'{"notes":"\\ud800"}',
        b"[" * 5_000,
        b'{"meta_data":' * 4_000,
    ],
)
async def test_malformed_body_is_refused(
    shared_client: httpx.AsyncClient, shared_database: Connection, body: bytes
) -> None:
    response = await shared_client.post("/v1/request", content=body, headers=JSON)

    assert response.status_code == 400
    assert response.json()["errors"][0]["code"] == "malformed_body"
    assert await nothing_is_stored(shared_database)


@pytest.mark.parametrize("body", [b"[]", b'"text"', b"null", b"7"])
async def test_body_that_is_not_an_object_is_refused(shared_client: httpx.AsyncClient, body: bytes) -> None:
    response = await shared_client.post("/v1/request", content=body, headers=JSON)

    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"] == ""


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_body_that_is_not_json_is_refused(shared_client: httpx.AsyncClient, media_type: str) -> None:
    response = await shared_client.post("/v1/request", content=b"{}", headers={"Content-Type": media_type})

    assert response.status_code == 415
    assert response.json()["errors"][0]["code"] == "unsupported_media_type"


async def test_at_most_fifty_unknown_fields_are_reported(shared_client: httpx.AsyncClient) -> None:
    response = await shared_client.post(
        "/v1/request", json={f"unknown-{number}": 1 for number in range(2_000)} | {"case_ref": 7}
    )

    codes = Counter(error["code"] for error in response.json()["errors"])
    assert codes == {"required": 7, "invalid_type": 1, "unknown_field": 50}


def escaped(value: object) -> str:
    """Return *value* as JSON with every character of every text escaped, which is its longest form."""
    match value:
        case str():
            units = value.encode("utf-16-be").hex()
            return '"' + "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)) + '"'
        case dict():
            return "{" + ",".join(f"{escaped(name)}:{escaped(part)}" for name, part in value.items()) + "}"
    return msgspec.json.encode(value).decode()


async def test_body_with_every_field_at_its_limit_is_accepted_fully_escaped(
    client: httpx.AsyncClient,
) -> None:
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

    response = await client.post("/v1/request", content=escaped(body), headers=JSON)

    assert response.status_code == 200, response.text
    assert {name: response.json()["data"][name] for name in body} == body


async def test_body_of_more_than_256_kib_is_refused(
    shared_client: httpx.AsyncClient, shared_database: Connection
) -> None:
    announced = await shared_client.post("/v1/request", content=b" " * (256 * 1024 + 1), headers=JSON)

    async def chunks() -> Any:
        for _ in range(257):
            yield b" " * 1024

    streamed = await shared_client.post("/v1/request", content=chunks(), headers=JSON)

    for response in (announced, streamed):
        assert response.status_code == 413
        assert response.json()["errors"][0]["code"] == "body_too_large"
    assert await nothing_is_stored(shared_database)


async def test_conveyancer_that_is_not_registered_is_refused(
    shared_client: httpx.AsyncClient, issuer: Issuer, shared_database: Connection
) -> None:
    for body in (A_REQUEST, {**A_REQUEST, **WAIVER}):
        response = await shared_client.post(
            "/v1/request", json=body, headers={"Authorization": f"Bearer {issuer.token('stranger')}"}
        )

        assert response.status_code == 403
        assert response.json()["errors"][0]["code"] == "unknown_conveyancer"
    assert await nothing_is_stored(shared_database)


async def test_busy_pool_is_answered_with_503(
    service_settings: ServiceSettings, issuer: Issuer, database: Connection
) -> None:
    settings = msgspec.structs.replace(service_settings, database_pool_size=1, database_timeout_seconds=0.2)
    async with api_client(settings, issuer.token()) as client, database.transaction():
        await database.execute("LOCK TABLE calculation_request")

        responses = await asyncio.gather(*(client.post("/v1/request", json=A_REQUEST) for _ in range(3)))

        for response in responses:
            assert response.status_code == 503
            assert response.headers["Retry-After"] == "1"
            assert response.json()["errors"][0]["code"] == "unavailable"
    assert await nothing_is_stored(database)


async def test_times_are_in_utc_and_recent(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/request", json=A_REQUEST)

    created_at = datetime.fromisoformat(response.json()["data"]["created_at"])
    assert abs((datetime.now(UTC) - created_at).total_seconds()) < 60


async def test_concurrent_creates_are_each_answered_for_their_own_request(
    client: httpx.AsyncClient, issuer: Issuer, database: Connection
) -> None:
    tenants = [CONVEYANCER, FREE_CONVEYANCER, "stranger"] * 10
    responses = await asyncio.gather(
        *(
            client.post(
                "/v1/request",
                json={**A_REQUEST, "case_ref": f"case {number}"},
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
    assert len(answered) == 20
    assert await database.fetchval("SELECT count(*) FROM outbox") == 20
