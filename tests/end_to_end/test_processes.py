"""Both processes: settings at their bounds, the end at SIGTERM, and what logs, traces and metrics show."""

import asyncio
import re
import time
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.inspect import FloatType, IntType, StructType, type_info
from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status

from service.settings import ServiceSettings
from service.telemetry import tracing
from tests.deploy.alerts import our_metrics
from tests.deploy.manifests import grace_seconds
from tests.deploy.pages import metrics_listed
from tests.end_to_end import parties
from tests.end_to_end.parties import answers, client_of, complete, create, publish_calculation
from tests.harness import metrics
from tests.harness.examples import A_REQUEST, CONVEYANCER
from tests.harness.http import bearer
from tests.harness.in_process import api_client, worker_probes
from tests.harness.loopback_server import LoopbackServer
from tests.harness.processes import Process, api_process, started, worker_process
from tests.harness.waiting import eventually
from worker.settings import EmailSettings

# Not at their bounds: the ports, and the time that the API goes on serving after SIGTERM.
_LEFT_OUT = {"PORT", "HEALTH_PORT", "SHUTDOWN_SECONDS"}
_SHUTDOWN_SECONDS = 15  # The API serves for a fifth of it.


def at_bounds(kind: type[msgspec.Struct], bound: str) -> dict[str, str]:
    """Return the variables of *kind* that have such a bound, at this bound."""
    described = type_info(kind)
    assert isinstance(described, StructType)
    numbers = {
        field.encode_name: getattr(each, bound)
        for field in described.fields
        for each in getattr(field.type, "types", [field.type])
        if isinstance(each, IntType | FloatType) and field.encode_name not in _LEFT_OUT
    }
    return {name: str(value) for name, value in numbers.items() if value is not None}


@pytest.mark.parametrize("bound", ["ge", "le"])
async def test_request_is_completed_with_every_number_at_its_bound(
    bound, service_settings, worker_settings, issuer, channel, subscriber, tmp_path
):
    api = api_process(service_settings, tmp_path, **at_bounds(ServiceSettings, bound))
    worker = worker_process(worker_settings, tmp_path, **at_bounds(EmailSettings, bound))

    async with started(api, worker), client_of(api, issuer.token()) as caller:
        await complete((await create(caller))["uuid"], channel, subscriber)


async def test_processes_end_in_time_serve_to_the_end_and_lose_and_repeat_nothing_that_they_had_accepted(
    *, service_settings, worker_settings, issuer, database, subscriber, mail_server, tmp_path
):
    api = api_process(service_settings, tmp_path, SHUTDOWN_SECONDS=str(_SHUTDOWN_SECONDS))
    worker = worker_process(worker_settings, tmp_path, SHUTDOWN_SECONDS=str(_SHUTDOWN_SECONDS))
    created: list[httpx.Response] = []

    async def create_until_the_api_is_gone() -> None:
        with suppress(httpx.TransportError):
            while True:
                created.append(await caller.post("/v1/request", json=parties.another_request()))
                await asyncio.sleep(0.02)  # Each create costs an e-mail.

    async with (
        started(api, worker),
        httpx.AsyncClient(base_url=api.probes_url) as probes,
        client_of(api, issuer.token()) as caller,
        asyncio.TaskGroup() as callers,
    ):
        for _ in range(3):
            callers.create_task(create_until_the_api_is_gone())
        await eventually(lambda: len(created) >= 50 and mail_server.accepted)
        began_at = time.monotonic()
        api.terminate()
        worker.terminate()
        await eventually(lambda: answers(probes, "/readyz", 503))
        before_the_end = len(created)
        is_alive = await answers(probes, "/livez", 200)
        await eventually(lambda: len(created) > before_the_end + 3)
        statuses = await asyncio.gather(api.exit_status(), worker.exit_status())
        seconds = time.monotonic() - began_at
    rows = await database.fetch("SELECT external_id, customer_email FROM calculation_request")
    mailed_before = len(mail_server.accepted)
    async with started(worker):  # The next pod.
        await eventually(lambda: len(subscriber.event_ids) >= 2 * len(rows))

    assert (is_alive, *statuses) == (True, 0, 0)
    assert seconds < min(_SHUTDOWN_SECONDS, grace_seconds()), "a process is cut off then"
    assert {answer.status_code for answer in created} == {200}
    answered = {answer.json()["data"]["external_id"] for answer in created}
    assert answered == {row["external_id"] for row in rows}, "each stored one was answered, and the reverse"
    assert mailed_before < len(rows), "the worker was stopped while e-mails were due"
    recipients = [mail.recipients[0] for mail in mail_server.accepted]
    assert sorted(recipients) == sorted(row["customer_email"] for row in rows)


_TRACE, _UNSAMPLED, _FAILED = "0af7651916cd43dd8448eb211c80319c", "1" * 32, "2" * 32
_CALLER = "b7ad6b7169203331"
_LIBRARY = ("process_", "python_")


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
        texts = [(await probes.get("/metrics")).text for probes in (api_probes, probes_of_worker)]

    check_story(uuid, api, worker)
    check_trace(uuid, collector)
    assert all(_TRACE in event["traceparent"] for event in subscriber.about(uuid)[:2])
    assert "case-17" not in str(subscriber.received)
    of_api, of_worker = (
        {name for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE) if not name.startswith(_LIBRARY)}
        for text in texts
    )
    listed = [metrics_listed(process).keys() for process in ("both processes", "API", "worker")]
    assert listed == [of_api & of_worker, of_api - of_worker, of_worker - of_api]
    assert not any(private in "".join(texts) for private in (CONVEYANCER, uuid))
    for name, labels in metrics.read(texts[0]).keys() | metrics.read(texts[1]).keys():
        if not name.startswith(_LIBRARY):
            assert our_metrics().get(name) == {label for label, _ in labels}, name


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


async def test_traces_have_errors_and_nothing_personal_or_secret_and_no_call_that_is_not_sampled(
    *, service_settings, worker_settings, issuer, collector, subscriber
):
    settings = replace(service_settings, otel_exporter_otlp_endpoint=collector.endpoint)
    token, nowhere = issuer.token(), "postgresql://nobody:hidden@127.0.0.1:9/nothing"
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
