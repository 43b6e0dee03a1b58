"""The metrics that the processes export, and the pages that list them."""

import re

import httpx

from tests.deploy.alerts import our_metrics
from tests.deploy.pages import metrics_listed
from tests.harness.examples import A_REQUEST, CONVEYANCER
from tests.harness.metrics import scrape
from tests.harness.processes import started
from tests.harness.waiting import eventually

_OF_THE_LIBRARY = ("process_", "python_")


async def test_each_process_exports_the_metrics_that_pages_alerts_and_dashboard_name(
    *, api, worker, caller, subscriber
):
    async with (
        started(api, worker),
        httpx.AsyncClient(base_url=api.probes_url) as api_probes,
        httpx.AsyncClient(base_url=worker.probes_url) as worker_probes,
    ):
        uuid = (await caller.post("/v1/request", json=A_REQUEST)).json()["data"]["uuid"]
        await eventually(lambda: "request.email_sent" in subscriber.types(uuid))
        of_api, of_worker = await scrape(api_probes), await scrape(worker_probes)
        families = [await _families(api_probes), await _families(worker_probes)]

    shared = families[0] & families[1]
    listed = [metrics_listed(process).keys() for process in ("both processes", "API", "worker")]
    assert listed == [shared, *(of_process - shared for of_process in families)]
    known = our_metrics()
    values_of_labels = str([*of_api, *of_worker])
    assert CONVEYANCER not in values_of_labels
    assert uuid not in values_of_labels
    for name, labels in of_api.keys() | of_worker.keys():
        if not name.startswith(_OF_THE_LIBRARY):
            assert known.get(name) == {label for label, _ in labels}, name


async def _families(client: httpx.AsyncClient) -> set[str]:
    names = re.findall(r"^# TYPE (\S+)", (await client.get("/metrics")).text, re.MULTILINE)
    return {name for name in names if not name.startswith(_OF_THE_LIBRARY)}
