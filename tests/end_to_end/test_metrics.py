"""The metrics that the processes export, and the pages that list them."""

import re

import httpx

from tests.deploy.exported_metrics import our_metrics
from tests.deploy.pages import metrics_listed
from tests.harness.examples import A_REQUEST
from tests.harness.metrics import scrape, series
from tests.harness.processes import started
from tests.harness.waiting import eventually

_OF_THE_LIBRARY = ("process_", "python_")


async def test_each_process_exports_the_metrics_that_pages_alerts_and_dashboard_name(
    *, api, worker, caller, subscriber
):
    async with started(api, worker), httpx.AsyncClient(base_url=worker.base_url) as probe:
        uuid = (await caller.post("/v1/request", json=A_REQUEST)).json()["data"]["uuid"]
        await eventually(lambda: "request.email_sent" in subscriber.types(uuid))
        of_api, of_worker = await scrape(caller), await scrape(probe)
        families = [await _families(caller), await _families(probe)]

    posted = series("http_request_duration_seconds_count", method="POST", route="/v1/request", status="200")
    assert of_api[posted] == 1
    counted = {
        series("emails_total", outcome="sent"): 1,
        series("relay_events_published_total", type="request.created"): 1,
        series("consumer_messages_total", queue="notifications", outcome="handled"): 1,
        series("emails_pending"): 0,
        series("broker_connected", connection="relay"): 1,
        series("broker_connected", connection="notifications"): 1,
        series("broker_connected", connection="calculation-results"): 1,
    }
    assert of_worker.items() >= counted.items()
    assert of_worker[series("outbox_pending_events")] in {0, 1}
    shared = families[0] & families[1]
    assert shared == {
        "build_info",
        "postgres_login_rejected",
        "postgres_pool_connections",
        "postgres_pool_max_connections",
        "postgres_pool_wait_seconds",
        "postgres_unavailable_total",
        "background_failures_total",
        "request_secret_keys_missing_total",
    }
    listed = [metrics_listed(process).keys() for process in ("both processes", "API", "worker")]
    assert listed == [shared, *(of_process - shared for of_process in families)]
    known = our_metrics()
    for name, labels in of_api.keys() | of_worker.keys():
        if not name.startswith(_OF_THE_LIBRARY):
            assert known.get(name) == frozenset(label for label, _ in labels), name


async def _families(client: httpx.AsyncClient) -> set[str]:
    names = re.findall(r"^# TYPE (\S+)", (await client.get("/metrics")).text, re.MULTILINE)
    return {name for name in names if not name.startswith(_OF_THE_LIBRARY)}
