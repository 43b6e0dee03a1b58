"""The metrics that the processes and the engines export, and those that a query uses."""

import re
from collections.abc import Iterable, Mapping

# The labels that Prometheus and its operator add to everything they scrape.
TARGET_LABELS = frozenset({"job", "instance", "namespace", "pod", "container", "endpoint"})

_HISTOGRAMS: Mapping[str, frozenset[str]] = {
    "postgres_pool_wait_seconds": frozenset(),
    "http_request_duration_seconds": frozenset({"method", "route", "status"}),
    "relay_confirm_seconds": frozenset(),
    "relay_delivery_seconds": frozenset(),
    "consumer_message_seconds": frozenset({"queue"}),
    "email_delivery_seconds": frozenset(),
}
_COUNTERS_AND_GAUGES: Mapping[str, frozenset[str]] = {
    "build_info": frozenset({"version", "python"}),
    "postgres_pool_connections": frozenset({"state"}),
    "postgres_pool_max_connections": frozenset(),
    "postgres_unavailable_total": frozenset(),
    "background_failures_total": frozenset({"work"}),
    "request_secret_keys_missing_total": frozenset(),
    "process_cpu_seconds_total": frozenset(),
    "process_resident_memory_bytes": frozenset(),
    "http_requests_in_progress": frozenset(),
    "access_token_cache_total": frozenset({"result"}),
    "jwks_refresh_total": frozenset({"result"}),
    "jwks_age_seconds": frozenset(),
    "outbox_pending_events": frozenset(),
    "outbox_failing_events": frozenset(),
    "outbox_waiting_events": frozenset(),
    "outbox_parked_events": frozenset(),
    "outbox_oldest_event_age_seconds": frozenset(),
    "relay_events_published_total": frozenset({"type"}),
    "relay_events_failed_total": frozenset({"reason"}),
    "relay_unconfirmed_events": frozenset(),
    "relay_wakeups_total": frozenset({"source"}),
    "relay_outages_total": frozenset({"dependency"}),
    "relay_lanes_passed_over_total": frozenset(),
    "broker_blocked": frozenset(),
    "broker_connected": frozenset({"connection"}),
    "consumer_messages_total": frozenset({"queue", "outcome"}),
    "consumer_reading": frozenset({"queue"}),
    "consumer_dead_letters": frozenset({"queue"}),
    "emails_total": frozenset({"outcome"}),
    "emails_pending": frozenset(),
    "emails_oldest_pending_age_seconds": frozenset(),
    "reconciliation_discrepancies": frozenset({"kind"}),
    "reconciliation_last_success_timestamp_seconds": frozenset(),
}

# Of CloudNativePG, its Barman Cloud plugin, RabbitMQ and the kubelet: only those that are used.
_OF_ENGINES: Mapping[str, frozenset[str]] = {
    "cnpg_pg_replication_streaming_replicas": frozenset(),
    "cnpg_pg_stat_archiver_last_failed_time": frozenset(),
    "cnpg_pg_stat_archiver_last_archived_time": frozenset(),
    "barman_cloud_cloudnative_pg_io_last_available_backup_timestamp": frozenset(),
    "rabbitmq_build_info": frozenset({"rabbitmq_version", "erlang_version"}),
    "rabbitmq_detailed_queue_info": frozenset({"vhost", "queue", "queue_type", "membership"}),
    "rabbitmq_detailed_raft_term_total": frozenset({"vhost", "queue"}),
    "kubelet_volume_stats_available_bytes": frozenset({"persistentvolumeclaim"}),
    "kubelet_volume_stats_capacity_bytes": frozenset({"persistentvolumeclaim"}),
}

_STRING = re.compile(r'"(?:\\.|[^"\\])*"')
_RANGE = re.compile(r"\[[^\]]*\]|\boffset\s+\w+")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"\b([a-zA-Z_:][\w:]*)\b(?!\s*\()\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*[=!]")
_OPERATORS = frozenset({"and", "or", "unless", "bool", "by", "without", "on", "ignoring"})


def exported_metrics() -> Mapping[str, frozenset[str]]:
    """Return the labels of every series that the processes and the engines export, by its name."""
    return {**our_metrics(), **_OF_ENGINES}


def our_metrics() -> Mapping[str, frozenset[str]]:
    """Return the labels of every series that the service's processes export, by its name."""
    parts = {
        f"{name}_{suffix}": labels | extra
        for name, labels in _HISTOGRAMS.items()
        for suffix, extra in (("bucket", {"le"}), ("sum", frozenset[str]()), ("count", frozenset[str]()))
    }
    return {**_COUNTERS_AND_GAUGES, **parts}


def not_exported(query: str) -> set[str]:
    """Return what a PromQL query uses and no process exports: names, and labels as `name{label}`.

    A label that a query groups by has to be one of some metric in it.
    """
    exported = exported_metrics()
    bare = _RANGE.sub("", _STRING.sub("", query))
    groupings = _GROUPING.findall(bare)
    selectors = [
        (name, _MATCHER.findall(matchers))
        for name, matchers in _SELECTOR.findall(_GROUPING.sub("", bare))
        if name not in _OPERATORS
    ]
    assert selectors, f"this query selects nothing: {query}"
    names = {name for name, _ in selectors}
    known = TARGET_LABELS.union(*(exported.get(name, ()) for name in names))
    return {
        *names.difference(exported),
        *_labels_not_of(exported, selectors),
        *({label for grouping in groupings for label in re.findall(r"\w+", grouping)} - known),
    }


def _labels_not_of(
    exported: Mapping[str, frozenset[str]], selectors: Iterable[tuple[str, list[str]]]
) -> set[str]:
    return {
        f"{name}{{{label}}}"
        for name, labels in selectors
        for label in labels
        if name in exported and label not in exported[name] | TARGET_LABELS
    }
