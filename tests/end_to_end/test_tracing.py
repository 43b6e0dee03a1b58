"""One trace from the caller to the e-mail, exported over OTLP; and no tracing unless it is configured."""

import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status

from service.telemetry import tracing
from tests.end_to_end.callers import client_of, create
from tests.harness.examples import A_REQUEST, CONVEYANCER
from tests.harness.in_process import api_client, worker_probes
from tests.harness.processes import api_process, started, worker_process
from tests.harness.waiting import eventually

_TRACE = "0af7651916cd43dd8448eb211c80319c"
_ANOTHER_TRACE = "1" * 32
_CALLER = "b7ad6b7169203331"


class Collector:
    """A collector of traces, and what it has received."""

    def __init__(self) -> None:
        self.received: list[ResourceSpans] = []
        self.endpoint = ""

    @property
    def spans(self) -> list[Span]:
        """Every span received."""
        scopes = [scope for resource in self.received for scope in resource.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def of_trace(self, trace_id: str) -> dict[str, Span]:
        """Return the spans of one trace by name."""
        return {span.name: span for span in self.spans if span.trace_id.hex() == trace_id}


@pytest.fixture
def collector():
    """A real OTLP/HTTP receiver, to which the processes export."""
    made = Collector()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.received += ExportTraceServiceRequest.FromString(body).resource_spans
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server, ThreadPoolExecutor() as thread:
        thread.submit(server.serve_forever, poll_interval=0.05)
        made.endpoint = f"http://127.0.0.1:{server.server_port}"
        yield made
        server.shutdown()


def attributes_of(traced: Span | Resource) -> dict[str, str | int]:
    return {
        attribute.key: attribute.value.string_value or attribute.value.int_value
        for attribute in traced.attributes
    }


@pytest.fixture
def traced_chain(service_settings, worker_settings, collector, issuer):
    """An API, with changes to its settings, and a worker in this process, to be run once.

    All spans are exported when the block is left.
    """

    @asynccontextmanager
    async def run(**changes: str) -> AsyncIterator[httpx.AsyncClient]:
        settings = replace(service_settings, otel_exporter_otlp_endpoint=collector.endpoint, **changes)
        with tracing.exporting(settings, service="tests"):
            async with api_client(settings, issuer.token()) as caller, worker_probes(worker_settings):
                yield caller

    return run


async def test_one_trace_leads_from_the_caller_to_the_email(
    *, service_settings, worker_settings, tmp_path, collector, subscriber, issuer, mail_server
):
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
    api = api_process(service_settings, tmp_path, **endpoint)
    worker = worker_process(worker_settings, tmp_path, **endpoint)
    async with started(api, worker), client_of(api, issuer.token()) as caller:
        uuid = await _create(caller, _TRACE, sampled=True)
        await eventually(lambda: "request.email_sent" in subscriber.types(uuid))
    assert len(mail_server.accepted) == 1

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
    assert attributes_of(publish) == {
        "messaging.system": "rabbitmq",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "calculation-requests:request.created",
        "messaging.rabbitmq.destination.routing_key": "request.created",
        "messaging.message.id": f"{uuid}.request.created.1",
    }
    assert all(_TRACE in event["traceparent"] for event in subscriber.about(uuid))
    assert {attributes_of(each.resource)["service.name"] for each in collector.received} == {
        "calculation-requests-api",
        "calculation-requests-worker",
    }
    assert worker.output.count("worker_stopped") == 1


async def test_traces_contain_nothing_personal_or_secret_and_no_call_that_is_not_sampled(
    traced_chain, collector, subscriber
):
    async with traced_chain() as caller:
        token = caller.headers["Authorization"].removeprefix("Bearer ")
        unsampled = await _create(caller, _ANOTHER_TRACE, sampled=False)
        await eventually(lambda: "request.email_sent" in subscriber.types(unsampled))
        uuid = await _create(caller, _TRACE, sampled=True)
        await eventually(lambda: "request.email_sent" in subscriber.types(uuid))
        record = (await caller.get(f"/v1/request/{uuid}?secret=query-string")).json()["data"]
        await caller.head(f"/v1/request/{uuid}")
        with_secret = {"Authorization": f"Bearer {record['secret']}"}
        assert (await caller.get(f"/v1/request/{uuid}", headers=with_secret)).status_code == 200
        await caller.get("/v1/request/req_0000000000000000000000", headers=with_secret)
        await caller.get("/v1/ada@customer.example.com?secret=query-string")
        await caller.post("/v1/request", json={"customer_email": "ada@customer.example.com"})
    await eventually(lambda: "POST /v1/request" in {span.name for span in collector.spans})
    exported = "".join(str(resource) for resource in collector.received)

    assert record["uuid"] in exported  # in the ids of messages: that is how a trace is found
    for private in (*A_REQUEST.values(), CONVEYANCER, token, record["secret"], "query-string", "secret="):
        assert str(private) not in exported
    assert collector.of_trace(_ANOTHER_TRACE) == {}
    passed_on = f"00-{_ANOTHER_TRACE}-.{{16}}-00"
    assert all(re.fullmatch(passed_on, event["traceparent"]) for event in subscriber.about(unsampled))
    names = {span.name for span in collector.spans}
    assert names >= {"GET", "GET /v1/request/{uuid}", "HEAD /v1/request/{uuid}"}


async def test_internal_error_is_marked_and_its_text_left_out(traced_chain, collector):
    async with traced_chain(database_url="postgresql://nobody:hidden@127.0.0.1:9/nothing") as caller:
        response = await caller.post("/v1/request", json=A_REQUEST)

    assert response.status_code == 503
    await eventually(lambda: len(collector.spans) >= 2)
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"POST /v1/request", "INSERT calculation_request"}
    for span in spans.values():
        assert span.status.code == Status.STATUS_CODE_ERROR
        assert (span.status.message, list(span.events)) == ("", [])
    assert attributes_of(spans["POST /v1/request"])["error.type"] == "503"


async def _create(caller: httpx.AsyncClient, trace: str, *, sampled: bool) -> str:
    traceparent = f"00-{trace}-{_CALLER}-{'01' if sampled else '00'}"
    return (await create(caller, A_REQUEST, traceparent=traceparent))["uuid"]
