"""Behaviour of every route: paths, request ids, readiness, unforeseen failures."""

import pytest
from structlog.testing import capture_logs

from tests.harness.examples import A_REQUEST
from tests.harness.waiting import eventually


@pytest.mark.parametrize(
    "alias",
    [
        "//metrics",
        "/%2fmetrics",
        "/metrics/",
        "/%6detrics",
        "/metrics%2f",
        "/v1%2frequest",
        "/v1//request",
        "/v1/request/",
        "/v1/questionnaire/structure/",
        "/livez/",
        "/schema/",
        "/schema//openapi.json",
        "/v1/%2e%2e/metrics",
    ],
)
async def test_path_has_one_spelling(shared_client, alias):
    with capture_logs() as logs:
        response = await shared_client.get(shared_client.base_url.copy_with(raw_path=alias.encode()))
        served = await eventually(lambda: [line for line in logs if line["event"] == "request_served"])

    assert response.status_code == 404
    assert response.json()["errors"][0]["code"] == "not_found"
    assert response.headers["X-Request-Id"]
    assert [line["route"] for line in served] == ["unmatched"]


@pytest.mark.parametrize("sent", ["", "ada@example.com", "x" * 129, "a b"])
async def test_other_request_ids_are_replaced(shared_client, sent):
    response = await shared_client.get("/livez", headers={"X-Request-Id": sent})

    assert response.headers["X-Request-Id"] not in ("", sent)


async def test_process_is_not_ready_on_an_older_schema(client, database):
    await database.execute("DELETE FROM schema_version")
    older = await client.get("/readyz")
    await database.execute("DROP TABLE schema_version")
    none = await client.get("/readyz")

    for response in (older, none):
        assert response.status_code == 503
        assert "schema apply" in response.json()["postgres"]


async def test_unforeseen_failure_is_logged_and_not_shown_to_the_caller(client, database):
    await database.execute("ALTER TABLE calculation_request ADD CHECK (customer_first_name <> 'Ada')")

    with capture_logs() as logs:
        response = await client.post("/v1/request", json=A_REQUEST)

    assert response.status_code == 500
    assert "Ada" not in response.text
    failure = next(line for line in logs if line["event"] == "request_failed")
    assert (failure["error"], failure["sqlstate"]) == ("CheckViolationError", "23514")
    assert "Ada" not in str(logs)
