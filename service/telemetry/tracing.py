"""Traces, exported over OTLP if OTEL_EXPORTER_OTLP_ENDPOINT is set. Otherwise no spans are created.

Each request has a trace in any case: its events carry a `traceparent` (W3C Trace Context), and its log lines
the trace id. Attributes are never the path or query as sent, an address or a secret.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from random import randbytes
from typing import Literal, TypeAlias

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service import VERSION
from service.settings import Settings

Attributes: TypeAlias = Mapping[str, str | int]
Kind: TypeAlias = Literal["server", "client", "producer", "consumer"]

_EXPORT_SECONDS = 5.0  # for one batch, retries included
FLUSH_SECONDS = 2.0  # for the remaining spans at the end; the collector may be down
_W3C = TraceContextTextMapPropagator()

_tracer: Tracer | None = None


@contextmanager
def exporting(settings: Settings, *, service: str) -> Iterator[None]:
    """Trace the block if the settings name a collector; export the remaining spans at its end.

    A thread exports batches. Its queue is bounded, so excess spans are dropped. Sampling follows the
    caller's flag unless OTEL_TRACES_SAMPLER says otherwise.
    """
    global _tracer  # noqa: PLW0603 - one per process, like the logs
    if settings.otel_exporter_otlp_endpoint is None:
        yield
        return
    # Imported here, because only tracing needs their 200 modules.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": service, "service.version": VERSION})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    url = f"{settings.otel_exporter_otlp_endpoint.removesuffix('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=_EXPORT_SECONDS)))
    _tracer = provider.get_tracer("calculation-requests", VERSION)
    try:
        yield
    finally:
        _tracer = None
        # Shutting down may take half a minute; the daemon thread ends with the process.
        flushing = threading.Thread(target=provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)


def is_on() -> bool:
    """Whether spans are created."""
    return _tracer is not None


@contextmanager
def span(
    name: str, kind: Kind, attributes: Callable[[], Attributes], *, parent: str | None = None
) -> Iterator[Span]:
    """Run a block as a span. Its parent is the span in the traceparent *parent*, else the current span.

    The span records an exception's class, but not its text, which may quote values. While tracing is off,
    *attributes* is not called, and no span is begun: OpenTelemetry's own span that does nothing takes 12 µs.
    """
    if _tracer is None:
        yield INVALID_SPAN
        return
    context = _W3C.extract({"traceparent": parent}) if parent else None
    with _tracer.start_as_current_span(
        name,
        context,
        SpanKind[kind.upper()],
        attributes(),
        record_exception=False,
        set_status_on_exception=False,
    ) as current:
        try:
            yield current
        except BaseException as error:
            current.set_attribute("error.type", type(error).__name__)
            current.set_status(StatusCode.ERROR)
            raise


def onward(incoming: str | None) -> str:
    """Return the traceparent to pass on: the current span's, else *incoming*, else a new one, not sampled."""
    current = _traceparent_of() if is_on() else None
    return current or incoming or f"00-{randbytes(16).hex()}-{randbytes(8).hex()}-00"  # noqa: S311 - ids


def accept(value: object) -> str | None:
    """Return *value* if it is a traceparent (W3C Trace Context, section 3.2), else None."""
    return _traceparent_of(_W3C.extract({"traceparent": value})) if isinstance(value, str) else None


def find(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the traceparent among the headers of an HTTP request, or None if it is missing or malformed."""
    return next((accept(value.decode("latin-1")) for name, value in headers if name == b"traceparent"), None)


def _traceparent_of(context: Context | None = None) -> str | None:
    """Return the traceparent of the span in *context*, by default the current span."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context)
    return carrier.get("traceparent")
