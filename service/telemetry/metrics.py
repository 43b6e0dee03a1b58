"""What both processes count for Prometheus, and the text in which it is told. Labels are bounded sets."""

import math
import platform
from collections.abc import Callable, Iterable
from typing import cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

import service

CONTENT_TYPE = "text/plain; version=0.0.4"  # of the exposition; the charset is added by Litestar
UNKNOWN = math.nan  # the value of a gauge while nobody can tell it

# No second series for each counter, which nothing here asks for.
cast("Callable[[], None]", disable_created_metrics)()

_build = Gauge("build_info", "Always 1; which release runs, and on which Python.", ["version", "python"])
_build.labels(service.VERSION, platform.python_version()).set(1)

pool_connections = Gauge("postgres_pool_connections", "Connections of the pool, lent out and not.", ["state"])
pool_max_connections = Gauge("postgres_pool_max_connections", "How many connections the pool may have.")
pool_wait_seconds = Histogram(
    "postgres_pool_wait_seconds",
    "The wait for a connection of the pool, where one was got.",
    buckets=(0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5),
)
postgres_unavailable = Counter(
    "postgres_unavailable_total", "How often Postgres or the pool did not answer in time."
)
secret_keys_missing = Counter(
    "request_secret_keys_missing_total",
    "How often a request's secret could not be made: REQUEST_SECRET_KEYS lacks its key.",
)

background_failures = Counter(
    "background_failures_total",
    "Unforeseen failures of work in the background, which then begins again.",
    ["work"],
)


def watch_pool(*, max_size: int, open_size: Callable[[], int], idle_size: Callable[[], int]) -> None:
    """Show the connections of this process's pool, whenever somebody looks."""
    pool_max_connections.set(max_size)
    pool_connections.labels("idle").set_function(idle_size)
    pool_connections.labels("used").set_function(lambda: open_size() - idle_size())


def exposition(registries: Iterable[CollectorRegistry]) -> bytes:
    """Return every metric in *registries* in the text format of Prometheus."""
    return b"".join(map(generate_latest, registries))
