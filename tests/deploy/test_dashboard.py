"""The dashboard uses only exported metrics, in valid PromQL."""

import re
from typing import Any

import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from tests.deploy.exported_metrics import TARGET_LABELS, exported_metrics, not_exported
from tests.deploy.promtool import check_rules

FILE = CHECKOUT / "deploy" / "k8s" / "components" / "monitoring" / "dashboard.json"
DASHBOARD = msgspec.json.decode(FILE.read_bytes())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES: list[str] = [target["expr"] for panel in PANELS for target in panel["targets"]]
GRAFANA_VARIABLES = {
    "$__rate_interval": "1m",
    "$job": "(.*/)?calculation-requests",
    "$namespace": ".*",
}


def filled_in(query: str) -> str:
    """Return a query with its variables filled in, as Grafana does."""
    for name, value in GRAFANA_VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


@pytest.mark.parametrize("query", QUERIES)
def test_query_asks_for_what_is_exported(query):
    assert not_exported(filled_in(query)) == set()


def test_queries_are_well_formed(tmp_path):
    rules = [{"record": f"panel_{n}", "expr": filled_in(query)} for n, query in enumerate(QUERIES)]

    assert f"{len(QUERIES)} rules found" in check_rules([{"name": "dashboard", "rules": rules}], tmp_path)


@pytest.mark.parametrize("query", QUERIES)
def test_query_looks_at_one_installation(query):
    selectors = re.findall(r"\{[^}]*\}", query)

    assert selectors
    assert all('namespace=~"$namespace"' in selector for selector in selectors)
    for selector in selectors:
        others = ('job=~"(.*/)?calculation-requests-', 'persistentvolumeclaim=~"')
        assert 'job=~"$job"' in selector or any(other in selector for other in others)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_legend_names_labels_that_the_query_keeps(panel):
    for target in panel["targets"]:
        kept = {
            label
            for grouping in re.findall(r"\bby \(([^)]*)\)", target["expr"])
            for label in grouping.split(", ")
        }
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept


def test_every_metric_is_shown():
    shown = set(re.findall(r"\w+", " ".join(QUERIES)))
    measured = {re.sub("_(bucket|sum|count)$", "", name) for name in exported_metrics()}

    assert {name for name in measured if not shown & {name, f"{name}_bucket"}} == set()


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ('sum by (queue) (rate(consumer_messages_total{outcome="handled"}[5m]))', set()),
        ("outbox_pending", {"outbox_pending"}),
        ("relay_delivery", {"relay_delivery"}),
        ("sum(rate(relay_delivery_seconds_bucket[5m])) by (queue)", {"queue"}),
        ('emails_total{status="sent", pod!="1"} offset 5m', {"emails_total{status}"}),
        ('emails_pending{job="a} b{c"} > 5 and on (namespace) time() - jwks_age > 1e3', {"jwks_age"}),
    ],
)
def test_what_is_not_exported_is_found(query, wrong):
    assert not_exported(query) == wrong


def test_no_metric_has_a_label_that_prometheus_adds():
    assert all(labels.isdisjoint(TARGET_LABELS) for labels in exported_metrics().values())
