"""POST /v1/request. tests/service/api/test_openapi.py provokes each refusal."""

import re
from datetime import datetime

import msgspec
from structlog.testing import capture_logs

from service.api.openapi.examples import FULL_REQUEST
from service.identifiers import parse_uuid
from service.outbox.events import RequestCreated
from tests.harness.examples import A_LARGEST_REQUEST, A_REQUEST, CONVEYANCER
from tests.harness.in_process import api_client
from tests.harness.metrics import rises
from tests.harness.stored import QUEUED, count_rows


async def test_created_request_is_returned_as_the_interface_specifies(client):
    response = await client.post("/v1/request", json=FULL_REQUEST)

    assert response.status_code == 200
    body = response.json()
    assert body["status"] == {"code": 200, "message": "OK"}
    assert body["errors"] is None
    assert datetime.fromisoformat(body["meta"]["timestamp"]).utcoffset() is not None
    assert "." in body["meta"]["timestamp"]
    data = body["data"]
    assert re.fullmatch(r"req_[0-9A-Za-z]{22}", data["uuid"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", data["created_at"])
    assert data == FULL_REQUEST | {
        **{name: data[name] for name in ("uuid", "created_at", "secret")},
        "updated_at": data["created_at"],
        "calculation_id": None,
        "request_url": f"https://app.example.com/calculator/request/{data['uuid']}?secret={data['secret']}",
    }


async def test_link_has_no_double_slash_if_the_url_of_the_application_ends_with_one(service_settings, issuer):
    app_url = "https://app.example.com/sdlt/"
    async with api_client(service_settings, issuer.token(), app_url=app_url) as client:
        record = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]

    assert record["request_url"].startswith(f"{app_url}calculator/request/")


async def test_request_and_event_are_stored_together_and_the_secret_is_not(client, database):
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    response = await client.post("/v1/request", json=FULL_REQUEST, headers={"traceparent": traceparent})

    created = response.json()["data"]
    (row,) = await database.fetch(QUEUED)
    assert row[:3] == (parse_uuid(created["uuid"]), 1, "request.created")
    assert (row["conveyancer_id"], row["traceparent"]) == (CONVEYANCER, traceparent)
    assert row["time"].strftime("%Y-%m-%dT%H:%M:%SZ") == created["created_at"]
    names = FULL_REQUEST.keys() & {*RequestCreated.__struct_fields__}
    announced = {name: FULL_REQUEST[name] for name in names}
    assert msgspec.json.decode(row["data"]) == {
        "uuid": created["uuid"],
        "tenant": CONVEYANCER,
        "sequence": 1,
        **announced,
    }
    stored = await database.fetchval("SELECT string_agg(r::text, '') FROM calculation_request AS r")
    assert created["secret"] not in stored


async def test_postgres_rejects_nothing_that_passes_validation(service_settings, issuer, database):
    """Otherwise it would reject all creates of a group commit. tests/fuzz sends more bodies."""
    firm = "\U0001f3e0" * 255
    await database.execute("INSERT INTO conveyancer VALUES ($1, 'Longest', true)", firm)
    deepest: object = 1
    for _ in range(15):
        deepest = [deepest]
    numbers = [2**63 - 1, -(2**63), -0.1, 5e-324]
    bodies = [
        A_LARGEST_REQUEST,
        A_LARGEST_REQUEST | {"meta_data": {"deepest": deepest}},
        A_LARGEST_REQUEST | {"meta_data": {'\x01\x7f\uffff"\\': numbers}, "notes": "\t\r\n\ufdd0"},
    ]

    async with api_client(service_settings, issuer.token(client_id=firm)) as client:
        answers = [
            await client.post("/v1/request", json=body, headers={"Idempotency-Key": f"{number}" + "~" * 254})
            for number, body in enumerate(bodies)
        ]

    assert [answer.status_code for answer in answers] == [200] * len(bodies), answers[-1].text
    stored = [answer.json()["data"] for answer in answers]
    assert [each["meta_data"] for each in stored] == [each["meta_data"] for each in bodies]


async def test_request_is_not_stored_when_its_event_cannot_be_and_only_the_log_says_why(client, database):
    await database.execute("ALTER TABLE outbox ADD CHECK (traceparent = '')")
    counted = "http_request_duration_seconds_count"

    with capture_logs() as logs, rises(counted, method="POST", route="/v1/request", status="500"):
        response = await client.post("/v1/request", json=A_REQUEST)

    assert response.status_code == 500
    assert response.json()["errors"][0]["code"] == "internal_error"
    assert await count_rows(database) == (0, 0)
    failure = next(line for line in logs if line["event"] == "request_failed")
    assert (failure["error"], failure["sqlstate"]) == ("CheckViolationError", "23514")
    assert "outbox" not in response.text
    assert "Ada" not in response.text + str(logs)
