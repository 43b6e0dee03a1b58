"""The metrics that the API exports."""

import pytest

from tests.harness.examples import A_REQUEST, CONVEYANCER
from tests.harness.http import bearer
from tests.harness.metrics import rises, scrape, series

_REQUESTS = "http_request_duration_seconds_count"
_NOT_THERE = "/v1/request/req_0000000000000000000000"


@pytest.mark.parametrize(
    ("method", "path", "options", "route", "status"),
    [
        ("POST", "/v1/request", {"json": A_REQUEST}, "/v1/request", 200),
        ("POST", "/v1/request", {"json": {}}, "/v1/request", 422),
        ("GET", _NOT_THERE, {}, "/v1/request/{uuid}", 404),
        ("DELETE", _NOT_THERE, {}, "unmatched", 405),
        ("GET", "/v1/nothing/ada@example.com?secret=s", {}, "unmatched", 404),
        ("PURGE", "/v1/nothing", {}, "unmatched", 404),
    ],
)
async def test_requests_are_counted_by_template_and_status(client, method, path, options, route, status):
    known = method if method != "PURGE" else "other"
    with rises(_REQUESTS, method=known, route=route, status=str(status)):
        response = await client.request(method, path, **options)

    assert response.status_code == status


async def test_metrics_need_no_token_and_reveal_nothing_about_callers(service_settings, issuer, client):
    created = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
    await client.get(f"/v1/request/{created['uuid']}")
    secrets = (created["secret"], created["secret"][::-1])
    for secret in secrets:
        await client.get(f"/v1/request/{created['uuid']}", headers=bearer(secret))
    del client.headers["Authorization"]
    text = (await client.get("/metrics")).text
    exported = await scrape(client)

    assert exported[series("postgres_pool_connections", state="idle")] >= 1
    assert 0 <= exported[series("jwks_age_seconds")] < 60
    assert exported[series("postgres_pool_wait_seconds_count")] >= 2
    assert exported[series("postgres_pool_max_connections")] == service_settings.database_pool_size
    assert exported[series(_REQUESTS, method="GET", route="/v1/request/{uuid}", status="200")] >= 1
    assert series("process_cpu_seconds_total") in exported
    for private in (CONVEYANCER, created["uuid"], *secrets, "example.com", issuer.token()):
        assert private not in text
