"""The alerts, and Prometheus's own tool, which checks rules and evaluates them on made-up series."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from deploy.local.machine.folders import CHECKOUT
from tests.harness.programs import debian_program

_COMPONENTS = CHECKOUT / "deploy" / "k8s" / "components"
_FILES = [_COMPONENTS / name / "alerts.yaml" for name in ("monitoring", "engine-monitoring")]
GROUPS = [group for file in _FILES for group in msgspec.yaml.decode(file.read_bytes())["spec"]["groups"]]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDINGS = {rule["record"]: rule for rule in RULES if "record" in rule}

_MINUTES = {"m": 1, "h": 60, "d": 24 * 60}
_USUAL = {"namespace": "here", "pod": "1", "queue": "notifications"}
_JOBS = {
    "cnpg_pgbouncer_": "-postgres-pooler",
    "cnpg_": "-postgres",
    "barman_": "-postgres",
    "rabbitmq_": "-rabbitmq",
}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Made-up series, a sample at every interval, and labels with which the alert fires, if it does.

    A rule with `for` must not fire that long before *at*, in minutes.
    """

    story: str
    series: Mapping[str, str]
    at: float
    fires: Sequence[Mapping[str, str]] = ()
    every: str = "15s"


def see(cases: Mapping[str, Sequence[Case]], folder: Path) -> None:
    """Evaluate the cases of each alert. Fails with what is different. Skips the test without promtool."""
    files = []
    for alert, its_own in cases.items():
        rules = {"groups": [{"name": alert, "rules": [*recordings_of(alert), ALERTS[alert]]}]}
        content = {
            "rule_files": [str(written(folder / f"{alert}-rules.json", rules))],
            "evaluation_interval": its_own[0].every,
            "tests": [_unit_test(alert, case) for case in its_own],
        }
        files.append(written(folder / f"{alert}.json", content))
    promtool("test", "rules", *files)


def _unit_test(alert: str, case: Case) -> dict[str, Any]:
    samples = [
        {"labels": f"ALERTS{{{','.join(_matchers(labels_of(alert, labels)))}}}", "value": 1}
        for labels in case.fires
    ]
    looks = [(case.at, samples)]
    if case.fires and (lasting := ALERTS[alert].get("for")):
        looks.append((case.at - int(lasting[:-1]) * _MINUTES[lasting[-1]], []))
    query = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
    return {
        "name": f"{alert}: {case.story}",
        "interval": case.every,
        "input_series": [
            {"series": of_target(name), "values": values} for name, values in case.series.items()
        ],
        "promql_expr_test": [
            {"expr": query, "eval_time": f"{at * 60:.0f}s", "exp_samples": seen} for at, seen in looks
        ],
    }


def recordings_of(alert: str) -> list[dict[str, Any]]:
    """Return the recordings that an alert asks for, directly or through other recordings."""
    wanted = ALERTS[alert]["expr"]
    for name in reversed(RECORDINGS):  # each asks only for earlier ones
        if name in wanted:
            wanted += RECORDINGS[name]["expr"]
    return [rule for name, rule in RECORDINGS.items() if name in wanted]


def queries_of(alert: str) -> list[str]:
    """Return the query of an alert, and those of its recordings."""
    return [rule["expr"] for rule in (ALERTS[alert], *recordings_of(alert))]


def labels_of(alert: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Return all labels of a firing alert: *labels*, and the usual ones by which its rule groups first."""
    rule = ALERTS[alert]
    grouping = re.search(r"by \(([^)]*)\)", " ".join(queries_of(alert)))
    grouped_by = re.findall(r"\w+", grouping[1]) if grouping else []
    usual = {name: value for name, value in _USUAL.items() if name in grouped_by}
    return {"alertname": alert, "alertstate": "firing", **rule["labels"], **usual, **labels}


def of_target(series: str) -> str:
    """Return a series with the labels that Prometheus's operator adds."""
    name, _, own = series.rstrip("}").partition("{")
    engine = next((ours for prefix, ours in _JOBS.items() if name.startswith(prefix)), "")
    added = {"job": f"here/calculation-requests{engine}", "namespace": "here"}
    if "pod=" not in own:
        added["pod"] = "1"
    return f"{name}{{{','.join([*filter(None, [own]), *_matchers(added)])}}}"


def _matchers(labels: Mapping[str, str]) -> list[str]:
    """Return labels as PromQL writes them."""
    return [f'{label}="{value}"' for label, value in labels.items()]


def promtool(*words: str | Path) -> str:
    """Run promtool, which must succeed, and return its output. Skips the test where there is none."""
    command = debian_program("promtool", package="prometheus")
    ended = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def check_rules(groups: Any, folder: Path) -> str:
    """Check the syntax of rule groups. Warnings, for instance about duplicates, are errors."""
    rules = written(folder / "rules.json", {"groups": groups})
    return promtool("check", "rules", "--lint=all", "--lint-fatal", rules)


def written(file: Path, content: Any) -> Path:
    """Write JSON, which is also YAML."""
    file.write_bytes(msgspec.json.encode(content))
    return file
