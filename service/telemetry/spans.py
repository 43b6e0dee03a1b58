"""What a tracer offers: implemented by `otlp`, used by `tracing`."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Literal, Protocol, TypeAlias

Attributes: TypeAlias = Mapping[str, str | int]
Kind: TypeAlias = Literal["server", "client", "producer", "consumer"]


class Span(Protocol):
    """A span in progress."""

    def describe(self, name: str, attributes: Attributes, *, failed: bool) -> None:
        """Rename the span and add what was not known when it began."""


class Tracer(Protocol):
    """Makes spans."""

    def span(
        self, name: str, kind: Kind, *, parent: str | None, attributes: Attributes
    ) -> AbstractContextManager[Span]:
        """Run a block as a span, whose parent is *parent* or else the current span."""

    def traceparent(self) -> str | None:
        """Return the context of the current span (W3C Trace Context, section 3.2)."""
