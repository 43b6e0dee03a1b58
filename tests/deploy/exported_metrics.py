"""The metrics that the processes and the engines export, and those that a query uses."""

import re
from collections.abc import Iterable, Mapping

from tests.deploy.pages import metrics_listed

# The labels that Prometheus and its operator add to everything they scrape.
TARGET_LABELS = frozenset({"job", "instance", "namespace", "pod", "container", "endpoint"})

# Of the client library, and used by the dashboard.
_OF_THE_LIBRARY: Mapping[str, frozenset[str]] = {
    "process_cpu_seconds_total": frozenset(),
    "process_resident_memory_bytes": frozenset(),
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
    """Return the labels of every series of our processes, as deploy/reference.md lists them, by its name."""
    series = dict(_OF_THE_LIBRARY)
    for process in ("both processes", "API", "worker"):
        for name, (labels, is_histogram) in metrics_listed(process).items():
            if is_histogram:
                series |= {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
            else:
                series[name] = labels
    return series


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
