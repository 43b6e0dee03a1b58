"""Traces, exported over OTLP when OTEL_EXPORTER_OTLP_ENDPOINT is set. Otherwise no spans are made.

Even then each request has a trace: events carry it, and log lines its id.

Attributes name kinds of things, such as routes and queues, but no path or query as sent, no address, no
secret. Hence no `url.path`, although the conventions want it: a path may hold anything.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from service.settings import Settings
from service.telemetry import trace_context
from service.telemetry.spans import Attributes, Kind, Span, Tracer


class _NoSpan:
    def describe(self, name: str, attributes: Attributes, *, failed: bool) -> None:
        pass


_NO_SPAN: AbstractContextManager[Span] = nullcontext(_NoSpan())
_tracer: Tracer | None = None


@contextmanager
def exporting(settings: Settings, *, service: str) -> Iterator[None]:
    """Trace the block if the settings name a collector; export the remaining spans at its end."""
    global _tracer  # noqa: PLW0603 - one per process, like the logs
    if settings.otel_exporter_otlp_endpoint is None:
        yield
        return
    from service.telemetry import otlp  # noqa: PLC0415 - loads many modules, needed only for tracing

    with otlp.open_tracer(settings.otel_exporter_otlp_endpoint, service=service) as _tracer:
        try:
            yield
        finally:
            _tracer = None


def is_on() -> bool:
    """Whether spans are made at all."""
    return _tracer is not None


def span(
    name: str, kind: Kind, attributes: Callable[[], Attributes], *, parent: str | None = None
) -> AbstractContextManager[Span]:
    """Run a block as a span; *attributes* is called only if tracing is on."""
    if _tracer is None:
        return _NO_SPAN
    return _tracer.span(name, kind, parent=parent, attributes=attributes())


def onward(incoming: str | None) -> str:
    """Return the traceparent to pass on: the current span's, else *incoming*, else that of a new trace."""
    return (_tracer.traceparent() if _tracer else None) or incoming or trace_context.begin()
