"""The metrics that the processes export, and the page that lists them."""

import re

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.deploy.exported_metrics import our_metrics
from tests.deploy.pages import metrics_listed
from tests.end_to_end.events import Subscriber
from tests.harness.examples import A_REQUEST
from tests.harness.metrics import scrape, series
from tests.harness.processes import Process, started
from tests.harness.waiting import eventually

_OF_THE_LIBRARY = ("process_", "python_")


async def test_both_processes_count_what_became_of_a_request(
    *, api: Process, worker: Process, caller: httpx.AsyncClient, subscriber: Subscriber
) -> None:
    async with started(api, worker), httpx.AsyncClient(base_url=worker.base_url) as probe:
        uuid = (await caller.post("/v1/request", json=A_REQUEST)).json()["data"]["uuid"]
        await eventually(lambda: "request.email_sent" in subscriber.types(uuid))
        of_api, of_worker = await scrape(caller), await scrape(probe)

    posted = series("http_request_duration_seconds_count", method="POST", route="/v1/request", status="200")
    assert of_api[posted] == 1
    assert of_worker[series("emails_total", outcome="sent")] == 1
    assert of_worker[series("relay_events_published_total", type="request.created")] == 1
    assert of_worker[series("consumer_messages_total", queue="notifications", outcome="handled")] == 1
    assert of_worker[series("outbox_pending_events")] in {0, 1}
    assert of_worker[series("emails_pending")] == 0
    for connection in ("relay", "notifications", "calculation-results"):
        assert of_worker[series("broker_connected", connection=connection)] == 1


async def test_page_for_operators_lists_every_metric_of_each_process_and_no_other(
    api: Process, worker: Process
) -> None:
    async with started(api, worker):
        exported = [await _families(api), await _families(worker)]

    shared = exported[0] & exported[1]
    assert metrics_listed("both processes").keys() == shared
    assert [metrics_listed("API").keys(), metrics_listed("worker").keys()] == [
        families - shared for families in exported
    ]


async def test_alerts_and_dashboard_are_checked_against_what_is_really_exported(
    *, api: Process, worker: Process, caller: httpx.AsyncClient, subscriber: Subscriber
) -> None:
    async with started(api, worker):
        uuid = (await caller.post("/v1/request", json=A_REQUEST)).json()["data"]["uuid"]
        await eventually(lambda: "request.email_sent" in subscriber.types(uuid))
        samples = [*await _samples(api), *await _samples(worker)]
        families = await _families(api) | await _families(worker)

    known = our_metrics()
    for sample in samples:
        assert known.get(sample.name) == sample.labels.keys(), sample.name
    without_suffix = {re.sub("_(bucket|sum|count)$", "", name) for name in known}
    assert families == {name for name in without_suffix if not name.startswith(_OF_THE_LIBRARY)}


async def test_each_process_exports_only_its_own_metrics(api: Process, worker: Process) -> None:
    async with started(api, worker):
        of_both = await _families(api) & await _families(worker)

    assert of_both == {
        "build_info",
        "postgres_pool_connections",
        "postgres_pool_max_connections",
        "postgres_pool_wait_seconds",
        "postgres_unavailable_total",
        "background_failures_total",
        "request_secret_keys_missing_total",
    }


async def _samples(process: Process) -> list[Sample]:
    async with httpx.AsyncClient(base_url=process.base_url) as client:
        text = (await client.get("/metrics")).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return [sample for sample in samples if not sample.name.startswith(_OF_THE_LIBRARY)]


async def _families(process: Process) -> set[str]:
    async with httpx.AsyncClient(base_url=process.base_url) as client:
        text = (await client.get("/metrics")).text
    names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    return {name for name in names if not name.startswith(_OF_THE_LIBRARY)}
