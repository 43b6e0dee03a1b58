"""Traces, exported over OTLP when OTEL_EXPORTER_OTLP_ENDPOINT is set; otherwise all this does nothing.

Attributes say what kind of thing was done, never to whom: no path or query as sent, no address, no secret.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

from service.settings import Settings

Attributes = Mapping[str, str | int]
Kind = Literal["server", "client", "producer", "consumer"]


class Span(Protocol):
    """A span that is under way."""

    def describe(self, name: str, attributes: Attributes, *, failed: bool) -> None:
        """Rename the span and say more about it, as far as that was not known when it began."""


class Tracer(Protocol):
    """What makes spans."""

    def span(
        self, name: str, kind: Kind, *, parent: str | None, attributes: Attributes
    ) -> AbstractContextManager[Span]:
        """Return a span for as long as a block runs; its parent is *parent* or the present span."""

    def traceparent(self) -> str | None:
        """Return the context of the present span (W3C Trace Context, section 3.2)."""


class _NoSpan:
    def describe(self, name: str, attributes: Attributes, *, failed: bool) -> None:
        pass


_NO_SPAN: AbstractContextManager[Span] = nullcontext(_NoSpan())
_tracer: Tracer | None = None


@contextmanager
def exporting(settings: Settings, *, service: str) -> Iterator[None]:
    """Trace what is done in the block, if the settings say where to; what is left is sent at its end."""
    global _tracer  # noqa: PLW0603 - one a process, like the logs
    if settings.otel_exporter_otlp_endpoint is None:
        yield
        return
    from service.telemetry import otlp  # noqa: PLC0415 - imports much, for nothing while nobody traces

    with otlp.open_tracer(settings.otel_exporter_otlp_endpoint, service=service) as _tracer:
        try:
            yield
        finally:
            _tracer = None


def is_on() -> bool:
    """Whether anything is traced."""
    return _tracer is not None


def span(
    name: str, kind: Kind, attributes: Callable[[], Attributes], *, parent: str | None = None
) -> AbstractContextManager[Span]:
    """Return a span for as long as a block runs; *attributes* are asked for only if it is traced."""
    if _tracer is None:
        return _NO_SPAN
    return _tracer.span(name, kind, parent=parent, attributes=attributes())


def onward(incoming: str | None) -> str | None:
    """Return the traceparent for what is caused: the present span's, or *incoming* if nothing is traced."""
    return (_tracer.traceparent() if _tracer else None) or incoming
