"""Metrics of this process or another one, read back."""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, frozenset[tuple[str, str]]]


def series(name: str, **labels: str) -> Series:
    return name, frozenset(labels.items())


def read(text: str) -> dict[Series, float]:
    """Return the value of every series in the text format of Prometheus."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(name: str, **labels: str) -> float:
    """Return the value of one series of this process, or 0 if there is none."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


@contextmanager
def rises(name: str, *, by: float = 1, **labels: str) -> Iterator[None]:
    """Check that a series of this process rises by *by* within the block."""
    before = value(name, **labels)
    yield
    assert value(name, **labels) - before == by, name
