"""What both processes show of a request: lines of logs, which two greps find, a trace, and metrics."""

import asyncio
import re
from contextlib import ExitStack
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status

from service.telemetry import tracing
from tests.deploy.exported_metrics import our_metrics
from tests.deploy.pages import metrics_listed
from tests.end_to_end.parties import client_of, complete, create, publish_calculation
from tests.harness.examples import A_REQUEST, CONVEYANCER
from tests.harness.http import bearer
from tests.harness.in_process import api_client, worker_probes
from tests.harness.loopback_server import LoopbackServer
from tests.harness.metrics import scrape
from tests.harness.processes import Process, api_process, started, worker_process
from tests.harness.waiting import eventually

_TRACE, _UNSAMPLED, _FAILED = "0af7651916cd43dd8448eb211c80319c", "1" * 32, "2" * 32
_CALLER = "b7ad6b7169203331"
_OF_THE_LIBRARY = ("process_", "python_")


class Collector(LoopbackServer):
    """A real OTLP/HTTP receiver, to which the processes export, and what it has received."""

    def __init__(self) -> None:
        super().__init__()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.received: list[ResourceSpans] = []

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            assert head.startswith(b"POST /v1/traces ")
            (length,) = re.findall(rb"content-length: (\d+)", head.lower())
            body = await reader.readexactly(int(length))
            self.received += ExportTraceServiceRequest.FromString(body).resource_spans
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    @property
    def spans(self) -> list[Span]:
        return [span for each in self.received for scope in each.scope_spans for span in scope.spans]

    def of_trace(self, trace_id: str) -> dict[str, Span]:
        """Return the spans of one trace by name."""
        return {span.name: span for span in self.spans if span.trace_id.hex() == trace_id}


@pytest.fixture
async def collector():
    async with Collector() as server:
        yield server


def traceparent(trace: str, *, sampled: bool = True) -> str:
    return f"00-{trace}-{_CALLER}-{'01' if sampled else '00'}"


def attributes_of(traced: Span | Resource) -> dict[str, str | int]:
    return {each.key: each.value.string_value or each.value.int_value for each in traced.attributes}


async def test_logs_trace_and_metrics_show_what_happened_to_a_request(
    *, service_settings, worker_settings, tmp_path, collector, channel, subscriber, issuer
):
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
    api = api_process(service_settings, tmp_path, **endpoint)
    worker = worker_process(worker_settings, tmp_path, **endpoint)
    async with (
        started(api, worker),
        client_of(api, issuer.token()) as caller,
        httpx.AsyncClient(base_url=api.probes_url) as api_probes,
        httpx.AsyncClient(base_url=worker.probes_url) as probes_of_worker,
    ):
        await create(caller)  # another one
        sent = {"X-Request-Id": "case-17", "traceparent": traceparent(_TRACE)}
        uuid = (await create(caller, A_REQUEST, **sent))["uuid"]
        await complete(uuid, channel, subscriber)
        await publish_calculation(channel, uuid, "calc-2")
        await eventually(lambda: "message_dead_lettered" in worker.output)
        await caller.get(f"/v1/request/{uuid}")
        exported = [(await scrape(probes)).keys() for probes in (api_probes, probes_of_worker)]
        families = [await families_of(probes) for probes in (api_probes, probes_of_worker)]

    check_story(uuid, api, worker)
    check_trace(uuid, collector)
    assert all(_TRACE in event["traceparent"] for event in subscriber.about(uuid)[:2])
    assert "case-17" not in str(subscriber.received)
    shared = families[0] & families[1]
    listed = [metrics_listed(process).keys() for process in ("both processes", "API", "worker")]
    assert listed == [shared, *(of_process - shared for of_process in families)]
    assert not any(private in str(exported) for private in (CONVEYANCER, uuid))
    for name, labels in exported[0] | exported[1]:
        if not name.startswith(_OF_THE_LIBRARY):
            assert our_metrics().get(name) == frozenset(label for label, _ in labels), name


def check_story(uuid: str, *processes: Process) -> None:
    """Check that the id of an HTTP request leads to the uuid, and the uuid to every line about it."""
    (posted,) = grep("case-17", *processes)
    assert (posted["event"], posted["uuid"], posted["trace_id"]) == ("request_served", uuid, _TRACE)
    for line in grep('"event":"(request|email|message|event|held_event)_', *processes):
        assert line["uuid"]
        assert re.fullmatch("[0-9a-f]{32}", line["trace_id"])
    story = grep(f"{uuid}|{_TRACE}", *processes)
    assert {line["uuid"] for line in story} == {uuid}
    assert sorted((line["event"], line.get("queue") or line.get("method", "")) for line in story) == [
        ("email_handled", ""),
        ("message_dead_lettered", "calculation-results"),
        ("message_handled", "calculation-results"),
        ("message_handled", "notifications"),
        ("request_served", "GET"),
        ("request_served", "POST"),
    ]
    by_trace = {line["event"] for line in grep(_TRACE, *processes)}
    assert by_trace == {"request_served", "message_handled", "email_handled"}


def grep(pattern: str, *processes: Process) -> list[dict[str, Any]]:
    """Return the lines of the processes' logs that match, in the order of the processes."""
    lines = [line for process in processes for line in process.output.splitlines()]
    return [msgspec.json.decode(line) for line in lines if re.search(pattern, line)]


def check_trace(uuid: str, collector: Collector) -> None:
    """Check that one trace leads from the caller to the e-mail."""
    spans = collector.of_trace(_TRACE)
    request = spans["POST /v1/request"]
    publish = spans["publish calculation-requests:request.created"]
    process = spans["process calculation-requests:request.created:notifications"]
    assert {name: (span.kind, span.parent_span_id) for name, span in spans.items()} == {
        request.name: (Span.SPAN_KIND_SERVER, bytes.fromhex(_CALLER)),
        "INSERT calculation_request": (Span.SPAN_KIND_CLIENT, request.span_id),
        publish.name: (Span.SPAN_KIND_PRODUCER, request.span_id),
        process.name: (Span.SPAN_KIND_CONSUMER, publish.span_id),
        "send e-mail": (Span.SPAN_KIND_CLIENT, process.span_id),
        "publish calculation-requests:request.email_sent": (Span.SPAN_KIND_PRODUCER, process.span_id),
    }
    assert attributes_of(request) == {
        "http.request.method": "POST",
        "http.route": "/v1/request",
        "http.response.status_code": 200,
        "url.scheme": "http",
    }
    assert attributes_of(publish)["messaging.message.id"] == f"{uuid}.request.created.1"
    services = {attributes_of(each.resource)["service.name"] for each in collector.received}
    assert services == {"calculation-requests-api", "calculation-requests-worker"}


async def families_of(probes: httpx.AsyncClient) -> set[str]:
    names = re.findall(r"^# TYPE (\S+)", (await probes.get("/metrics")).text, re.MULTILINE)
    return {name for name in names if not name.startswith(_OF_THE_LIBRARY)}


async def test_traces_have_errors_and_nothing_personal_or_secret_and_no_call_that_is_not_sampled(
    *, service_settings, worker_settings, issuer, collector, subscriber
):
    settings = replace(service_settings, otel_exporter_otlp_endpoint=collector.endpoint)
    token = issuer.token()
    nowhere = "postgresql://nobody:hidden@127.0.0.1:9/nothing"
    with ExitStack() as exporting:
        exporting.enter_context(tracing.exporting(settings, service="tests"))
        async with api_client(settings, token, database_url=nowhere) as caller:
            headers = {"traceparent": traceparent(_FAILED)}
            assert (await caller.post("/v1/request", json=A_REQUEST, headers=headers)).status_code == 503
        async with api_client(settings, token) as caller, worker_probes(worker_settings):
            unsampled, record = [
                await create(caller, A_REQUEST, traceparent=traceparent(trace, sampled=trace == _TRACE))
                for trace in (_UNSAMPLED, _TRACE)
            ]
            for uuid in (unsampled["uuid"], record["uuid"]):
                await eventually(lambda: "request.email_sent" in subscriber.types(uuid))  # noqa: B023 - at once
            path = f"/v1/request/{record['uuid']}"
            await caller.get(f"{path}?secret=query-string")
            await caller.head(path)
            assert (await caller.get(path, headers=bearer(record["secret"]))).status_code == 200
            await caller.get("/v1/request/req_0000000000000000000000", headers=bearer(record["secret"]))
            await caller.get("/v1/ada@customer.example.com?secret=query-string")
            await caller.post("/v1/request", json={"customer_email": "ada@customer.example.com"})
        await asyncio.to_thread(exporting.close)  # exports all spans

    exported = str(collector.received)
    assert record["uuid"] in exported  # in the ids of messages: that is how a trace is found
    for private in (*A_REQUEST.values(), CONVEYANCER, token, record["secret"], "query-string", "secret="):
        assert str(private) not in exported
    assert collector.of_trace(_UNSAMPLED) == {}
    passed_on = f"00-{_UNSAMPLED}-.{{16}}-00"
    assert all(re.fullmatch(passed_on, event["traceparent"]) for event in subscriber.about(unsampled["uuid"]))
    names = {span.name for span in collector.spans}
    assert names >= {"GET", "GET /v1/request/{uuid}", "HEAD /v1/request/{uuid}"}
    failed = collector.of_trace(_FAILED)
    assert failed.keys() == {"POST /v1/request", "INSERT calculation_request"}
    for span in failed.values():
        assert span.status.code == Status.STATUS_CODE_ERROR
        assert (span.status.message, list(span.events)) == ("", [])
    assert attributes_of(failed["POST /v1/request"])["error.type"] == "503"
