"""Behaviour of every route: paths, request ids, readiness."""

import pytest
from structlog.testing import capture_logs

from tests.harness.in_process import served
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
        lines = await eventually(lambda: served(logs))

    assert response.status_code == 404
    assert response.json()["errors"][0]["code"] == "not_found"
    assert response.headers["X-Request-Id"]
    assert [line["route"] for line in lines] == ["unmatched"]


@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [
        ("x" * 128, True),
        *((f"{character}a.b_c-D", character.isalnum()) for character in "9Zz._-"),
        *((other, False) for other in ("", "ada@example.com", "x" * 129, "a b")),
    ],
)
async def test_request_id_is_kept_if_it_is_short_plain_and_begins_with_a_letter_or_digit(
    shared_client, sent, is_kept
):
    response = await shared_client.get("/livez", headers={"X-Request-Id": sent})

    assert (response.headers["X-Request-Id"] == sent) == is_kept
    assert response.headers["X-Request-Id"]


async def test_process_is_not_ready_on_an_older_schema(client, database):
    await database.execute("DELETE FROM schema_version")
    older = await client.get("/readyz")
    await database.execute("DROP TABLE schema_version")
    none = await client.get("/readyz")

    for response in (older, none):
        assert response.status_code == 503
        assert "schema apply" in response.json()["postgres"]
