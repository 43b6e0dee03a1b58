"""Exports spans with OpenTelemetry. Only this module imports it, and is loaded only when tracing is on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service import VERSION
from service.telemetry.spans import Attributes, Kind

_EXPORT_SECONDS = 5.0  # for one batch, retries included
FLUSH_SECONDS = 2.0  # for the remaining spans at the end; the collector may be down

_propagator = TraceContextTextMapPropagator()


class OtlpSpan:
    """An OpenTelemetry span."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def describe(self, name: str, attributes: Attributes, *, failed: bool) -> None:
        """Rename the span and add attributes."""
        self._span.update_name(name)
        self._span.set_attributes(attributes)
        if failed:
            self._span.set_status(Status(StatusCode.ERROR))


class OtlpTracer:
    """Makes OpenTelemetry spans."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    @contextmanager
    def span(
        self, name: str, kind: Kind, *, parent: str | None, attributes: Attributes
    ) -> Iterator[OtlpSpan]:
        """Run a block as a span. Of an exception it gets the class, not the text, which may quote values."""
        context = _propagator.extract({"traceparent": parent}) if parent else None
        with self._tracer.start_as_current_span(
            name,
            context,
            SpanKind[kind.upper()],
            attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield OtlpSpan(span)
            except BaseException as error:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(Status(StatusCode.ERROR))
                raise

    def traceparent(self) -> str | None:
        """Return the context of the current span."""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier)
        return carrier.get("traceparent")


@contextmanager
def open_tracer(endpoint: str, *, service: str) -> Iterator[OtlpTracer]:
    """Open a tracer that exports batches from a thread. Its queue is bounded: spans are dropped beyond it.

    Sampling follows the caller's flag unless OTEL_TRACES_SAMPLER says otherwise.
    """
    ours = Resource.create({"service.name": service, "service.version": VERSION})
    exporter = OTLPSpanExporter(f"{endpoint.removesuffix('/')}/v1/traces", timeout=_EXPORT_SECONDS)
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield OtlpTracer(provider.get_tracer("calculation-requests", VERSION))
    finally:
        # The library may wait for half a minute; its daemon thread ends with the process.
        flushing = threading.Thread(target=provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
