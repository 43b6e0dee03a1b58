"""The Prometheus metrics of the API alone. The values of every label are a bounded set.

They have a registry of their own, so that a process without an API does not export them.
"""

import math
import time
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})  # the rest is "other"

request_seconds = Histogram(
    "http_request_duration_seconds",
    "From the head of an HTTP request to the end of its response.",
    ["method", "route", "status"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
    registry=REGISTRY,
)
requests_in_progress = Gauge("http_requests_in_progress", "HTTP requests in progress.", registry=REGISTRY)

token_cache = Counter(
    "access_token_cache_total",
    "Lookups in the cache of verified tokens.",
    ["result"],
    registry=REGISTRY,
)
token_hits, token_misses = token_cache.labels("hit"), token_cache.labels("miss")

_jwks_refresh = Counter(
    "jwks_refresh_total", "Attempts to fetch the issuer's signing keys.", ["result"], registry=REGISTRY
)
_jwks_refreshed, jwks_not_refreshed = _jwks_refresh.labels("ok"), _jwks_refresh.labels("failed")
jwks_age = Gauge(
    "jwks_age_seconds",
    "Seconds since the issuer's signing keys were fetched; +Inf before the first time.",
    registry=REGISTRY,
)
jwks_age.set(math.inf)


def note_keys_fetched() -> None:
    """Count a successful fetch of the signing keys, and measure their age from now on."""
    fetched_at = time.monotonic()
    _jwks_refreshed.inc()
    jwks_age.set_function(lambda: time.monotonic() - fetched_at)


def observe_request(*, method: str, route: str, status: int, seconds: float) -> None:
    """Count one HTTP request; nonstandard methods share one label."""
    _series(method if method in METHODS else "other", route, int(status)).observe(seconds)


@lru_cache(maxsize=1024)
def _series(method: str, route: str, status: int) -> Histogram:
    return request_seconds.labels(method, route, str(status))
