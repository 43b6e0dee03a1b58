"""The alerts, the dashboard, the metrics that both may use, and the tool of Prometheus that checks them."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from deploy.local.machine.folders import CHECKOUT
from tests.deploy.pages import metrics_listed
from tests.harness.programs import debian_program

_COMPONENTS = CHECKOUT / "deploy" / "k8s" / "components"
_FILES = [_COMPONENTS / name / "alerts.yaml" for name in ("monitoring", "engine-monitoring")]
GROUPS = [group for file in _FILES for group in msgspec.yaml.decode(file.read_bytes())["spec"]["groups"]]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDINGS = {rule["record"]: rule for rule in RULES if "record" in rule}
_DASHBOARD = msgspec.json.decode((_COMPONENTS / "monitoring" / "dashboard.json").read_bytes())
TOP: list[dict[str, Any]] = _DASHBOARD["panels"]
PANELS = [panel for each in TOP for panel in (each, *each.get("panels", ())) if panel["type"] != "row"]

# Of CloudNativePG's default queries, its poolers and backups, of RabbitMQ and the kubelet: only those used.
OF_ENGINES = {
    "cnpg_backends_max_tx_duration_seconds": {"datname", "usename", "application_name", "state"},
    "cnpg_backends_waiting_total": set[str](),
    "cnpg_pg_database_xid_age": {"datname"},
    "cnpg_pg_replication_lag": set[str](),
    "cnpg_pg_replication_streaming_replicas": set[str](),
    "cnpg_pg_stat_archiver_last_failed_time": set[str](),
    "cnpg_pg_stat_archiver_last_archived_time": set[str](),
    "cnpg_pg_stat_database_deadlocks": {"datname"},
    "cnpg_pgbouncer_pools_cl_waiting": {"database", "user"},
    "barman_cloud_cloudnative_pg_io_last_available_backup_timestamp": set[str](),
    "rabbitmq_build_info": {"rabbitmq_version", "erlang_version"},
    "rabbitmq_detailed_queue_info": {"vhost", "queue", "queue_type", "membership"},
    "rabbitmq_detailed_queue_messages": {"vhost", "queue"},
    "rabbitmq_detailed_raft_term_total": {"vhost", "queue"},
    "kubelet_volume_stats_available_bytes": {"persistentvolumeclaim"},
    "kubelet_volume_stats_capacity_bytes": {"persistentvolumeclaim"},
}
# The labels that Prometheus and its operator add to everything they scrape.
_TARGET_LABELS = {"job", "instance", "namespace", "pod", "container", "endpoint"}
_USUAL = {"namespace": "here", "pod": "1", "queue": "notifications", "vhost": "/", "work": "relay"}
_USUAL |= {"datname": "calculation_requests", "persistentvolumeclaim": "postgres-1-wal"}
_USUAL |= {"application_name": "psql", "kind": "request_without_email"}
_JOBS = {
    "cnpg_pgbouncer": "postgres-pooler",
    "cnpg": "postgres",
    "barman": "postgres",
    "rabbitmq": "rabbitmq",
}


class Case(msgspec.Struct, frozen=True):
    """Made-up series, and the labels with which the alert fires *at* a minute. Without them, it is silent.

    A rule with `for` must not fire that long before.
    """

    story: str
    series: Mapping[str, str]
    at: float
    fires: Sequence[Mapping[str, str]] = ()


def see(cases: Mapping[str, Sequence[Case]], folder: Path, every: Mapping[str, str] | None = None) -> None:
    """Evaluate the cases of each alert, with a sample *every* 15 s if no interval is given for the alert.

    Fails with what is different. Skips the test without promtool.
    """
    files = []
    for alert, its_own in cases.items():
        rules = {"groups": [{"name": alert, "rules": rules_of(alert)}]}
        interval = (every or {}).get(alert, "15s")
        content = {
            "rule_files": [str(written(folder / f"{alert}-rules.json", rules))],
            "evaluation_interval": interval,
            "tests": [{"interval": interval, **_unit_test(alert, case)} for case in its_own],
        }
        files.append(written(folder / f"{alert}.json", content))
    promtool("test", "rules", *files)


def _unit_test(alert: str, case: Case) -> dict[str, Any]:
    firing = [f"ALERTS{{{','.join(_matchers(labels_of(alert, labels)))}}}" for labels in case.fires]
    looks = [(case.at, [{"labels": labels, "value": 1} for labels in firing])]
    if case.fires and (lasting := ALERTS[alert].get("for")):
        looks.append((case.at - int(lasting[:-1]) * {"m": 1, "h": 60, "d": 24 * 60}[lasting[-1]], []))
    query = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
    return {
        "name": f"{alert}: {case.story}",
        "input_series": [{"series": of_target(name), "values": case.series[name]} for name in case.series],
        "promql_expr_test": [
            {"expr": query, "eval_time": f"{at * 60:.0f}s", "exp_samples": seen} for at, seen in looks
        ],
    }


def rules_of(alert: str) -> list[dict[str, Any]]:
    """Return an alert, after the recordings if it asks for any."""
    rule = ALERTS[alert]
    return [*RECORDINGS.values(), rule] if any(name in rule["expr"] for name in RECORDINGS) else [rule]


def labels_of(alert: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Return all labels of a firing alert: *labels*, and the usual ones by which its rule groups first."""
    grouping = re.search(r"by \(([^)]*)\)", " ".join(rule["expr"] for rule in rules_of(alert)))
    grouped_by = re.findall(r"\w+", grouping[1]) if grouping else []
    usual = {name: value for name, value in _USUAL.items() if name in grouped_by}
    return {"alertname": alert, "alertstate": "firing", **ALERTS[alert]["labels"], **usual, **labels}


def of_target(series: str) -> str:
    """Return a series with the labels that Prometheus's operator adds."""
    name, _, own = series.rstrip(",}").partition("{")
    engine = next((f"-{ours}" for prefix, ours in _JOBS.items() if name.startswith(prefix)), "")
    added = {"job": f"here/calculation-requests{engine}", "namespace": "here"}
    added |= {} if "pod=" in own else {"pod": "1"}
    return f"{name}{{{','.join([*filter(None, [own]), *_matchers(added)])}}}"


def _matchers(labels: Mapping[str, str]) -> list[str]:
    return [f'{label}="{value}"' for label, value in labels.items()]


def promtool(*words: str | Path) -> str:
    """Run promtool, which must succeed, and return its output. Skips the test where there is none."""
    command = debian_program("promtool", package="prometheus")
    ended = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def written(file: Path, content: Any) -> Path:
    """Write JSON, which is also YAML."""
    file.write_bytes(msgspec.json.encode(content))
    return file


def filled_in(query: str, namespace: str = ".*") -> str:
    """Return a query of the dashboard with its variables filled in, as Grafana does."""
    values = {"$__rate_interval": "1m", "$job": "(.*/)?calculation-requests", "$namespace": namespace}
    for name, value in values.items():
        query = query.replace(name, value)
    return query


def our_metrics() -> dict[str, set[str]]:
    """Return the labels of every series of our processes, as deploy/reference.md lists them, by its name."""
    series = {"process_cpu_seconds_total": set[str]()}  # of the client library, and used by the dashboard
    for process in ("both processes", "API", "worker"):
        for name, (labels, is_histogram) in metrics_listed(process).items():
            of_histogram = {f"{name}_bucket": {*labels, "le"}, f"{name}_sum": labels, f"{name}_count": labels}
            series |= of_histogram if is_histogram else {name: labels}
    return series


def not_exported(query: str) -> set[str]:
    """Return the series and labels that a PromQL query uses and no process exports.

    Every selector of the query has braces, but for recordings, which have the label namespace alone. A label
    that it groups by has to be one of some series in it.
    """
    exported = {**our_metrics(), **OF_ENGINES, **{name: set[str]() for name in RECORDINGS}}
    selectors = re.findall(r"([\w:]+)\{([^}]*)\}", query)
    names = {name for name, _ in selectors} | set(re.findall(r"\b\w+:[\w:]+", query))
    assert names, f"this query selects nothing: {query}"
    known = _TARGET_LABELS.union(*(exported.get(name, ()) for name in names))
    groupings = re.findall(r"\b(?:by|on) \(([^)]*)\)", query)
    matched = {
        f"{name}{{{label}}}"
        for name, matchers in selectors
        for label in re.findall(r'(\w+)(?:=~|!~|!=|=)"', matchers)
        if label not in exported.get(name, set()) | _TARGET_LABELS
    }
    return names.difference(exported) | matched | {*re.findall(r"\w+", " ".join(groupings))} - known
