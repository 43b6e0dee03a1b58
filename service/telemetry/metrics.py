"""The Prometheus metrics of both processes. Every label has a bounded set of values."""

import platform
from collections.abc import Callable
from typing import cast

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

import service

# Omits the `_created` series of each counter, because no dashboard or alert uses them.
cast("Callable[[], None]", disable_created_metrics)()

_build = Gauge("build_info", "Always 1; the labels name release and Python.", ["version", "python"])
_build.labels(service.VERSION, platform.python_version()).set(1)

pool_connections = Gauge("postgres_pool_connections", "Open connections of the pool.", ["state"])
pool_max_connections = Gauge("postgres_pool_max_connections", "The most connections that the pool may open.")
pool_wait_seconds = Histogram(
    "postgres_pool_wait_seconds",
    "Time for which callers waited until they got a connection of the pool.",
    buckets=(0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5),
)
postgres_unavailable = Counter(
    "postgres_unavailable_total", "Times that Postgres was unavailable or slow, or the pool's queue full."
)
postgres_login_rejected = Gauge(
    "postgres_login_rejected", "1 if Postgres rejected the login at the latest attempt to connect."
)
secret_keys_missing = Counter(
    "request_secret_keys_missing_total",
    "Times that a secret could not be derived, because REQUEST_SECRET_KEYS lacks its key.",
)

background_failures = Counter(
    "background_failures_total", "Unforeseen failures of background work, which is then restarted.", ["work"]
)
