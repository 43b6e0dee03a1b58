"""The metrics that the processes export, and the pages that list them."""

import re
from collections.abc import Set as AbstractSet

import httpx

from tests.deploy.exported_metrics import our_metrics
from tests.deploy.pages import metrics_listed
from tests.harness.examples import A_REQUEST
from tests.harness.metrics import Series, scrape, series
from tests.harness.processes import Process, started
from tests.harness.waiting import eventually

_OF_THE_LIBRARY = ("process_", "python_")


async def test_each_process_exports_the_metrics_that_pages_alerts_and_dashboard_name(
    *, api, worker, caller, subscriber
):
    async with started(api, worker), httpx.AsyncClient(base_url=worker.base_url) as probe:
        uuid = (await caller.post("/v1/request", json=A_REQUEST)).json()["data"]["uuid"]
        await eventually(lambda: "request.email_sent" in subscriber.types(uuid))
        of_api, of_worker = await scrape(caller), await scrape(probe)
        families = [await _families(api), await _families(worker)]

    _assert_request_is_counted(of_api, of_worker)
    _assert_only_what_is_shared_is_in_both(*families)
    _assert_page_lists_all(*families)
    _assert_alerts_and_dashboard_know_all(of_api.keys() | of_worker.keys(), families[0] | families[1])


def _assert_request_is_counted(of_api: dict[Series, float], of_worker: dict[Series, float]) -> None:
    posted = series("http_request_duration_seconds_count", method="POST", route="/v1/request", status="200")
    assert of_api[posted] == 1
    assert of_worker[series("emails_total", outcome="sent")] == 1
    assert of_worker[series("relay_events_published_total", type="request.created")] == 1
    assert of_worker[series("consumer_messages_total", queue="notifications", outcome="handled")] == 1
    assert of_worker[series("outbox_pending_events")] in {0, 1}
    assert of_worker[series("emails_pending")] == 0
    for connection in ("relay", "notifications", "calculation-results"):
        assert of_worker[series("broker_connected", connection=connection)] == 1


def _assert_only_what_is_shared_is_in_both(of_api: set[str], of_worker: set[str]) -> None:
    assert of_api & of_worker == {
        "build_info",
        "postgres_login_rejected",
        "postgres_pool_connections",
        "postgres_pool_max_connections",
        "postgres_pool_wait_seconds",
        "postgres_unavailable_total",
        "background_failures_total",
        "request_secret_keys_missing_total",
    }


def _assert_page_lists_all(of_api: set[str], of_worker: set[str]) -> None:
    """Check that the page for operators lists every metric of each process, and no other."""
    shared = of_api & of_worker
    assert metrics_listed("both processes").keys() == shared
    assert metrics_listed("API").keys() == of_api - shared
    assert metrics_listed("worker").keys() == of_worker - shared


def _assert_alerts_and_dashboard_know_all(exported: AbstractSet[Series], families: set[str]) -> None:
    """Check that the metrics with which alerts and dashboard are tested are those that exist."""
    known = our_metrics()
    for name, labels in exported:
        if not name.startswith(_OF_THE_LIBRARY):
            assert known.get(name) == frozenset(label for label, _ in labels), name
    without_suffix = {re.sub("_(bucket|sum|count)$", "", name) for name in known}
    assert families == {name for name in without_suffix if not name.startswith(_OF_THE_LIBRARY)}


async def _families(process: Process) -> set[str]:
    async with httpx.AsyncClient(base_url=process.base_url) as client:
        text = (await client.get("/metrics")).text
    names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    return {name for name in names if not name.startswith(_OF_THE_LIBRARY)}
