"""The metrics that the processes and the engines export, and those that a query uses."""

import re
from collections.abc import Mapping

from tests.deploy.alerts import RECORDINGS
from tests.deploy.pages import metrics_listed

# The labels that Prometheus and its operator add to everything they scrape.
TARGET_LABELS = frozenset({"job", "instance", "namespace", "pod", "container", "endpoint"})

# Of the client library, and used by the dashboard.
_OF_THE_LIBRARY = ("process_cpu_seconds_total",)

# Of CloudNativePG's default queries, its poolers and backups, of RabbitMQ and the kubelet: only those used.
OF_ENGINES: Mapping[str, frozenset[str]] = {
    "cnpg_backends_max_tx_duration_seconds": frozenset({"datname", "usename", "application_name", "state"}),
    "cnpg_backends_waiting_total": frozenset(),
    "cnpg_pg_database_xid_age": frozenset({"datname"}),
    "cnpg_pg_replication_lag": frozenset(),
    "cnpg_pg_replication_streaming_replicas": frozenset(),
    "cnpg_pg_stat_archiver_last_failed_time": frozenset(),
    "cnpg_pg_stat_archiver_last_archived_time": frozenset(),
    "cnpg_pg_stat_database_deadlocks": frozenset({"datname"}),
    "cnpg_pgbouncer_pools_cl_waiting": frozenset({"database", "user"}),
    "barman_cloud_cloudnative_pg_io_last_available_backup_timestamp": frozenset(),
    "rabbitmq_build_info": frozenset({"rabbitmq_version", "erlang_version"}),
    "rabbitmq_detailed_queue_info": frozenset({"vhost", "queue", "queue_type", "membership"}),
    "rabbitmq_detailed_queue_messages": frozenset({"vhost", "queue"}),
    "rabbitmq_detailed_raft_term_total": frozenset({"vhost", "queue"}),
    "kubelet_volume_stats_available_bytes": frozenset({"persistentvolumeclaim"}),
    "kubelet_volume_stats_capacity_bytes": frozenset({"persistentvolumeclaim"}),
}

_SELECTOR = re.compile(r"([\w:]+)\{([^}]*)\}")
_RECORDED = re.compile(r"\b\w+:[\w:]+")
_GROUPING = re.compile(r"\b(?:by|on) \(([^)]*)\)")


def our_metrics() -> Mapping[str, frozenset[str]]:
    """Return the labels of every series of our processes, as deploy/reference.md lists them, by its name."""
    series: dict[str, frozenset[str]] = dict.fromkeys(_OF_THE_LIBRARY, frozenset())
    for process in ("both processes", "API", "worker"):
        for name, (labels, is_histogram) in metrics_listed(process).items():
            of_histogram = {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
            series |= of_histogram if is_histogram else {name: labels}
    return series


def not_exported(query: str) -> set[str]:
    """Return the series and labels that a PromQL query uses and no process exports.

    Every selector of the query has braces, but for recordings, which have the label namespace alone. A label
    that it groups by has to be one of some series in it.
    """
    exported = {**our_metrics(), **OF_ENGINES, **dict.fromkeys(RECORDINGS, frozenset[str]())}
    selectors = _SELECTOR.findall(query)
    names = {name for name, _ in selectors} | set(_RECORDED.findall(query))
    assert names, f"this query selects nothing: {query}"
    known = TARGET_LABELS.union(*(exported.get(name, ()) for name in names))
    grouped_by = {label for labels in _GROUPING.findall(query) for label in re.findall(r"\w+", labels)}
    matched = {
        f"{name}{{{label}}}"
        for name, matchers in selectors
        for label in re.findall(r'(\w+)(?:=~|!~|!=|=)"', matchers)
        if label not in exported.get(name, frozenset()) | TARGET_LABELS
    }
    return names.difference(exported) | matched | (grouped_by - known)
