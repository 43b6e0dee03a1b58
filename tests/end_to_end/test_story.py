"""The story of a request, found in the logs of all processes with two greps, as the runbook says."""

import re
from typing import Any

import msgspec

from tests.end_to_end.events import complete, publish_calculation
from tests.harness.examples import A_REQUEST
from tests.harness.processes import Process, started
from tests.harness.waiting import eventually

ABOUT_A_REQUEST = '"event":"(request|email|message|event|held_event)_'
REQUEST_ID = "case-17"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


async def test_request_id_leads_to_the_uuid_and_the_uuid_to_every_line_about_the_request(
    *, api, worker, caller, channel, subscriber
):
    async with started(api, worker):
        sent = {"X-Request-Id": REQUEST_ID, "traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
        await caller.post("/v1/request", json=A_REQUEST)  # another one
        uuid = (await caller.post("/v1/request", json=A_REQUEST, headers=sent)).json()["data"]["uuid"]
        await complete(uuid, channel, subscriber)
        await publish_calculation(channel, uuid, "calc-2")
        await eventually(lambda: "message_dead_lettered" in worker.output)
        await caller.get(f"/v1/request/{uuid}")

    (posted,) = grep(REQUEST_ID, api, worker)
    assert (posted["event"], posted["uuid"], posted["trace_id"]) == ("request_served", uuid, TRACE_ID)
    for line in grep(ABOUT_A_REQUEST, api, worker):
        assert line["uuid"]
        assert re.fullmatch("[0-9a-f]{32}", line["trace_id"])
    story = grep(f"{uuid}|{TRACE_ID}", api, worker)
    assert {line["uuid"] for line in story} == {uuid}
    assert sorted((line["event"], line.get("queue") or line.get("method", "")) for line in story) == [
        ("email_handled", ""),
        ("message_dead_lettered", "calculation-results"),
        ("message_handled", "calculation-results"),
        ("message_handled", "notifications"),
        ("request_served", "GET"),
        ("request_served", "POST"),
    ]
    by_trace = grep(TRACE_ID, api, worker)
    assert {line["event"] for line in by_trace} == {"request_served", "message_handled", "email_handled"}
    assert all(TRACE_ID in event["traceparent"] for event in subscriber.about(uuid)[:2])
    assert REQUEST_ID not in str(subscriber.received)


def grep(pattern: str, *processes: Process) -> list[dict[str, Any]]:
    """Return the lines of the processes' logs that match, in the order of the processes."""
    lines = [line for process in processes for line in process.output.splitlines()]
    return [msgspec.json.decode(line) for line in lines if re.search(pattern, line)]
