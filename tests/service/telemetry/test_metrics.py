"""The metrics that the API exports."""

import pytest
from structlog.testing import capture_logs

from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_and_probes, served
from tests.harness.metrics import rises, scrape, series

_REQUESTS = "http_request_duration_seconds_count"
_NOT_THERE = "/v1/request/req_0000000000000000000000"


@pytest.mark.parametrize(
    ("method", "path", "options", "route", "status"),
    [
        ("POST", "/v1/request", {"json": A_REQUEST}, "/v1/request", 200),
        ("GET", _NOT_THERE, {}, "/v1/request/{uuid}", 404),
        ("GET", "/v1/nothing/ada@example.com?secret=s", {}, "unmatched", 404),
        ("PURGE", "/v1/nothing", {}, "unmatched", 404),
    ],
)
async def test_requests_are_counted_and_logged_by_template_and_status(
    client, method, path, options, route, status
):
    known = method if method != "PURGE" else "other"
    with capture_logs() as logs, rises(_REQUESTS, method=known, route=route, status=str(status)):
        response = await client.request(method, path, **options)

    assert response.status_code == status
    assert [(line["method"], line["route"]) for line in served(logs)] == [(known, route)]


async def test_pool_and_keys_are_measured_and_metrics_need_no_token(service_settings, issuer):
    async with api_and_probes(service_settings, issuer.token()) as (client, probes):
        await client.get(_NOT_THERE)
        exported = await scrape(probes)

    assert exported[series("postgres_pool_connections", state="idle")] >= 1
    assert exported[series("postgres_pool_wait_seconds_count")] >= 1
    assert exported[series("postgres_pool_max_connections")] == service_settings.database_pool_size
    assert 0 <= exported[series("jwks_age_seconds")] < 60
    assert series("process_cpu_seconds_total") in exported
