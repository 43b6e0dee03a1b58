"""The Prometheus metrics of the API. A worker that imported this module would export these metrics, too."""

from prometheus_client import Gauge, Histogram

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})  # the rest is "other"

request_seconds = Histogram(
    "http_request_duration_seconds",
    "From the head of an HTTP request to the end of its response.",
    ["method", "route", "status"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
)
requests_in_progress = Gauge("http_requests_in_progress", "HTTP requests in progress.")

jwks_age = Gauge(
    "jwks_age_seconds", "Seconds since the issuer's signing keys were fetched; +Inf before the first time."
)
