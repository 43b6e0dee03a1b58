"""A collector of traces: a real OTLP/HTTP receiver that keeps what it gets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """The traces received so far."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.endpoint = ""

    @property
    def spans(self) -> list[Span]:
        """Every span received."""
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def services(self) -> set[str]:
        """The names of the services that sent them."""
        return {
            attribute.value.string_value
            for request in self.requests
            for resource in request.resource_spans
            for attribute in resource.resource.attributes
            if attribute.key == "service.name"
        }

    def of_trace(self, trace_id: str) -> dict[str, Span]:
        """Return the spans of one trace by name."""
        return {span.name: span for span in self.spans if span.trace_id.hex() == trace_id}


def attributes_of(span: Span) -> dict[str, str | int]:
    """Return the attributes of a span."""
    return {
        attribute.key: attribute.value.string_value or attribute.value.int_value
        for attribute in span.attributes
    }


@contextmanager
def collecting() -> Iterator[Collector]:
    """Receive traces on a free port of the loopback until the block is left."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.endpoint = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join()
