"""The dashboard uses only exported metrics, in valid PromQL."""

import re

import pytest

from tests.deploy.alerts import RECORDINGS, RULES, check_rules
from tests.deploy.dashboard import QUERIES, ROWS, TOP, filled_in
from tests.deploy.exported_metrics import OF_ENGINES, not_exported, our_metrics

TARGETS_OF_ENGINES = ('job=~"(.*/)?calculation-requests-', 'persistentvolumeclaim=~"')


def test_queries_are_well_formed(tmp_path):
    rules = [{"record": f"panel_{n}", "expr": filled_in(query)} for n, query in enumerate(QUERIES)]

    assert f"{len(QUERIES)} rules found" in check_rules([{"name": "dashboard", "rules": rules}], tmp_path)


@pytest.mark.parametrize("query", QUERIES)
def test_query_asks_for_what_is_exported_and_looks_at_one_installation(query):
    assert not_exported(filled_in(query)) == set()
    for name, selector in re.findall(r"([\w:]+)(\{[^}]*\})", query):
        assert 'namespace=~"$namespace"' in selector
        others = (name in RECORDINGS, *(other in selector for other in TARGETS_OF_ENGINES))
        assert 'job=~"$job"' in selector or any(others)


def test_only_the_objectives_are_open_and_every_other_panel_is_in_a_closed_row():
    (first, *others) = ROWS

    assert (first["title"], first["collapsed"]) == ("Objectives", False)
    assert all(row["collapsed"] and row["panels"] for row in others)
    opened = [query["expr"] for panel in TOP if panel["type"] != "row" for query in panel["targets"]]
    assert {name for name in RECORDINGS if name in " ".join(opened)} == RECORDINGS.keys()


def test_every_metric_of_ours_is_shown_and_every_metric_of_an_engine_is_used():
    shown = set(re.findall(r"\w+", " ".join(QUERIES)))
    asked = set(re.findall(r"\w+", " ".join(rule["expr"] for rule in RULES)))
    ours = {re.sub("_(bucket|sum|count)$", "", name) for name in our_metrics()}

    assert {name for name in ours if not shown & {name, f"{name}_bucket"}} == set()
    assert OF_ENGINES.keys() - shown - asked == set()


def test_what_is_not_exported_is_found():
    queries = (
        'sum by (queue, le) (relay_delivery{job=~"a(b)"}) / rate(emails_total{status="sent", pod!="1"}[5m])'
    )

    assert not_exported(queries) == {"relay_delivery", "emails_total{status}", "queue", "le"}
