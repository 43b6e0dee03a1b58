"""Every alert fires on made-up series when it should and only then, and has a section in the runbook."""

import re
from typing import Any

import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from tests.deploy.exported_metrics import not_exported
from tests.deploy.pages import RUNBOOK
from tests.deploy.promtool import check_rules, run_tests

COMPONENTS = CHECKOUT / "deploy" / "k8s" / "components"
RULES = [COMPONENTS / name / "alerts.yaml" for name in ("monitoring", "engine-monitoring")]
GROUPS = [group for file in RULES for group in msgspec.yaml.decode(file.read_bytes())["spec"]["groups"]]
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}

API = "http_requests_in_progress"
RELAY = 'broker_connected{connection="relay"}'
NOTIFICATIONS = 'consumer_reading{queue="notifications"}'
CALCULATIONS = 'consumer_reading{queue="calculation-results"}'
ALL_ROLES = {API: "0x60", RELAY: "1x60", NOTIFICATIONS: "1x60", CALCULATIONS: "1x60"}
OLDEST_EVENT = "outbox_oldest_event_age_seconds"
DISCREPANCIES = 'reconciliation_discrepancies{kind="sequence_wrong"}'
CALLS = 'http_request_duration_seconds_count{route="/v1/request",method="POST",status="200"}'
FAILED = 'http_request_duration_seconds_count{route="/v1/request",method="POST",status="500"}'
TURNED_AWAY = 'http_request_duration_seconds_count{route="/v1/request",method="POST",status="503"}'
NOT_READY = 'http_request_duration_seconds_count{route="/readyz",method="GET",status="503"}'
FAST_CALLS = 'http_request_duration_seconds_bucket{route="/v1/request",method="POST",status="200",le="0.1"}'
SLOW_CALLS = 'http_request_duration_seconds_bucket{route="/v1/request",method="POST",status="200",le="1.0"}'
ALL_CALLS = 'http_request_duration_seconds_bucket{route="/v1/request",method="POST",status="200",le="+Inf"}'
SHORT_WAITS = 'postgres_pool_wait_seconds_bucket{le="0.1"}'
LONG_WAITS = 'postgres_pool_wait_seconds_bucket{le="1.0"}'
ALL_WAITS = 'postgres_pool_wait_seconds_bucket{le="+Inf"}'
DEAD_LETTERS = 'consumer_dead_letters{queue="notifications",pod="1"}'
NOT_COUNTED = " ".join(["NaN"] * 60)
RETURNED = 'consumer_messages_total{queue="notifications",outcome="returned"}'
OLDEST_EMAIL = "emails_oldest_pending_age_seconds"
SENT = 'emails_total{outcome="sent"}'
REFUSED = 'emails_total{outcome="failed"}'
POSTPONED = 'emails_total{outcome="postponed"}'
FAILURES = 'background_failures_total{work="relay"}'
KEYS_MISSING = "request_secret_keys_missing_total"
INTERNAL_ERROR = 'emails_total{outcome="internal_error"}'
RECONCILED = "reconciliation_last_success_timestamp_seconds"
STANDBYS = "cnpg_pg_replication_streaming_replicas"
NOT_ARCHIVED = "cnpg_pg_stat_archiver_last_failed_time"
ARCHIVED = "cnpg_pg_stat_archiver_last_archived_time"
BACKED_UP = "barman_cloud_cloudnative_pg_io_last_available_backup_timestamp"
FREE = 'kubelet_volume_stats_available_bytes{persistentvolumeclaim="postgres-1-wal"}'
SIZE = 'kubelet_volume_stats_capacity_bytes{persistentvolumeclaim="postgres-1-wal"}'


def nodes(count: int) -> dict[str, str]:
    """Return the series of *count* RabbitMQ nodes, each scraped at two paths."""
    return {
        f'rabbitmq_build_info{{pod="{pod}",erlang_version="{path}"}}': "1x60"
        for pod in range(count)
        for path in (1, 2)
    }


def members(count: int) -> dict[str, str]:
    """Return the series of *count* nodes that hold a queue, and of those that only know of it."""
    membership = [*["leader"][:count], *["follower"] * (count - 1), *["undefined"] * (3 - count)]
    return {
        f'rabbitmq_detailed_queue_info{{instance="{node}",queue="notifications",membership="{one}"}}': "1x400"
        for node, one in enumerate(membership)
    }


def members_before_4_1(count: int) -> dict[str, str]:
    """Return the series of *count* nodes of an older RabbitMQ that hold a queue."""
    return {
        f'rabbitmq_detailed_raft_term_total{{instance="{node}",queue="notifications"}}': "1x400"
        for node in range(count)
    }


ALL_ENGINES = {
    "Postgres": {STANDBYS: "2x80"},
    "backups": {BACKED_UP: "0x80"},
    "RabbitMQ": {'rabbitmq_detailed_queue_info{queue="notifications",membership="leader"}': "1x80"},
    "disks": {FREE: "9x80"},
}


class Case(msgspec.Struct, frozen=True):
    """Made-up series, a sample at every interval, and the labels with which the alert fires, if it does."""

    alert: str
    story: str
    series: dict[str, str]
    at: str
    fires: tuple[dict[str, str], ...] = ()
    every: str = "15s"


def fires(
    alert: str, story: str, series: dict[str, str], *, at: str, every: str = "15s", **labels: str
) -> Case:
    return Case(alert, story, series, at, (labels,), every)


def silent(alert: str, story: str, series: dict[str, str], *, at: str, every: str = "15s") -> Case:
    return Case(alert, story, series, at, every=every)


def watched(*engines: str) -> dict[str, str]:
    return {series: values for name in engines for series, values in ALL_ENGINES[name].items()}


def of_pod(series: str, pod: int) -> str:
    return series.replace("}", f',pod="{pod}"}}')


def without(name: str) -> dict[str, str]:
    return {series: values for series, values in ALL_ROLES.items() if series != name}


CASES = [
    silent("ProcessAbsent", "all roles are run", ALL_ROLES, at="10m"),
    fires("ProcessAbsent", "no api", without(API), at="6m", role="api"),
    fires("ProcessAbsent", "no relay", without(RELAY), at="6m", role="relay", connection="relay"),
    fires(
        "ProcessAbsent",
        "no notifications",
        without(NOTIFICATIONS),
        at="6m",
        role="notifications",
        queue="notifications",
    ),
    fires(
        "ProcessAbsent",
        "no calculations",
        without(CALCULATIONS),
        at="6m",
        role="calculations",
        queue="calculation-results",
    ),
    fires("PostgresUnavailable", "down", {"postgres_unavailable_total": "0+5x40"}, at="5m"),
    silent("PostgresUnavailable", "never", {"postgres_unavailable_total": "7x40"}, at="10m"),
    fires("PostgresLoginRejected", "it is", {"postgres_login_rejected": "0 1x40"}, at="5m", pod="1"),
    silent("PostgresLoginRejected", "it is not", {"postgres_login_rejected": "0x40"}, at="5m"),
    silent(
        "PostgresUnavailable",
        "failover of 30 seconds",
        {"postgres_unavailable_total": "0 9 99x40"},
        at="3m15s",
    ),
    fires(
        "PostgresPoolSaturated",
        "half wait long",
        {SHORT_WAITS: "0+5x80", LONG_WAITS: "0+10x80", ALL_WAITS: "0+10x80"},
        at="15m",
        pod="1",
    ),
    silent(
        "PostgresPoolSaturated", "few wait long", {SHORT_WAITS: "0+995x80", ALL_WAITS: "0+1000x80"}, at="15m"
    ),
    silent("PostgresPoolSaturated", "no waits", {SHORT_WAITS: "3x80", ALL_WAITS: "9x80"}, at="15m"),
    fires("BackgroundWorkFailing", "every minute", {FAILURES: "0+1x160"}, at="20m", work="relay"),
    silent("BackgroundWorkFailing", "once", {FAILURES: "0x20 1x140"}, at="20m"),
    fires("SecretKeyMissing", "one request", {KEYS_MISSING: "0x10 1x50"}, at="4m"),
    silent("SecretKeyMissing", "none", {KEYS_MISSING: "0x60"}, at="4m"),
    fires("ApiErrorRate", "2 %", {CALLS: "0+98x60", FAILED: "0+2x60"}, at="10m"),
    silent("ApiErrorRate", "0.5 %", {CALLS: "0+199x60", FAILED: "0+1x60"}, at="10m"),
    silent("ApiErrorRate", "one of few calls", {CALLS: "0+1x60", FAILED: "0x10 1x50"}, at="7m30s"),
    silent("ApiErrorRate", "503 does not count", {CALLS: "0+50x60", TURNED_AWAY: "0+50x60"}, at="10m"),
    fires("ApiUnavailable", "half", {CALLS: "0+50x60", TURNED_AWAY: "0+50x60"}, at="5m"),
    silent("ApiUnavailable", "2 %", {CALLS: "0+98x60", TURNED_AWAY: "0+2x60"}, at="10m"),
    silent("ApiUnavailable", "for 30 seconds", {CALLS: "0+50x60", TURNED_AWAY: "0 50 100x60"}, at="3m15s"),
    silent("ApiUnavailable", "only probes", {CALLS: "0+50x60", NOT_READY: "0+50x60"}, at="10m"),
    fires(
        "ApiSlow",
        "2 % over a second",
        {FAST_CALLS: "0+50x80", SLOW_CALLS: "0+98x80", ALL_CALLS: "0+100x80"},
        at="16m",
    ),
    silent(
        "ApiSlow",
        "0.2 % over 0.1 s",
        {FAST_CALLS: "0+998x80", SLOW_CALLS: "0+1000x80", ALL_CALLS: "0+1000x80"},
        at="16m",
    ),
    silent("ApiSlow", "no calls", {FAST_CALLS: "0x80", SLOW_CALLS: "9x80", ALL_CALLS: "9x80"}, at="16m"),
    fires("JwksStale", "not fetched", {"jwks_age_seconds": "0+15x200"}, at="40m"),
    fires("JwksStale", "never fetched", {"jwks_age_seconds": " ".join(["+Inf"] * 40)}, at="6m"),
    silent("JwksStale", "fetched every 5 minutes", {"jwks_age_seconds": "0+15x20 0+15x20"}, at="10m"),
    silent("JwksStale", "one fetch failed", {"jwks_age_seconds": "600x60"}, at="10m"),
    fires("RelayNotConnected", "none is", {RELAY: "1 0x20"}, at="3m"),
    silent("RelayNotConnected", "for a minute", {RELAY: "1 0x4 1x10"}, at="3m"),
    silent(
        "RelayNotConnected",
        "one of two is not",
        {of_pod(RELAY, 1): "0x20", of_pod(RELAY, 2): "1x20"},
        at="5m",
    ),
    fires("BrokerBlocked", "an alarm", {"broker_blocked": "0 1x20"}, at="3m"),
    silent("BrokerBlocked", "for a minute", {"broker_blocked": "0 1x4 0x10"}, at="3m"),
    fires("OutboxNotDraining", "the oldest gets older", {OLDEST_EVENT: "0+15x60"}, at="10m"),
    silent("OutboxNotDraining", "the oldest is young", {OLDEST_EVENT: "0 30x60"}, at="10m"),
    silent("OutboxNotDraining", "drained after five minutes", {OLDEST_EVENT: "0+15x20 0x20"}, at="6m"),
    silent("OutboxNotDraining", "Postgres is down", {OLDEST_EVENT: NOT_COUNTED}, at="10m"),
    fires("EventsRetrying", "one is", {"outbox_retrying_events": "1x60"}, at="6m"),
    silent("EventsRetrying", "mended after four minutes", {"outbox_retrying_events": "1x16 0x40"}, at="6m"),
    fires(
        "ConsumerNotReading",
        "one queue",
        {NOTIFICATIONS: "0x20", CALCULATIONS: "1x20"},
        at="3m",
        queue="notifications",
    ),
    silent(
        "ConsumerNotReading",
        "one of two readers",
        {of_pod(NOTIFICATIONS, 1): "0x20", of_pod(NOTIFICATIONS, 2): "1x20"},
        at="5m",
    ),
    fires(
        "MessagesDeadLettered", "one comes", {DEAD_LETTERS: "0x10 1x50"}, at="2m45s", queue="notifications"
    ),
    fires("MessagesDeadLettered", "one is left", {DEAD_LETTERS: "1x2000"}, at="8h", queue="notifications"),
    fires(
        "MessagesDeadLettered",
        "one of two processes counts it",
        {DEAD_LETTERS: "1x60", 'consumer_dead_letters{queue="notifications",pod="2"}': NOT_COUNTED},
        at="10m",
        queue="notifications",
    ),
    fires(
        "MessagesDeadLettered",
        "a short outage of the broker",
        {DEAD_LETTERS: f"1x20 {' '.join(['NaN'] * 16)} 1x20"},
        at="8m",
        queue="notifications",
    ),
    silent("MessagesDeadLettered", "none is left", {DEAD_LETTERS: "1x10 0x60"}, at="8m"),
    silent("MessagesDeadLettered", "not counted", {DEAD_LETTERS: NOT_COUNTED}, at="10m"),
    fires(
        "DeadLettersExpiring",
        "there are always some, but for an outage",
        {DEAD_LETTERS: "1x100 NaN NaN NaN 2x600"},
        at="481h",
        every="1h",
        queue="notifications",
    ),
    silent(
        "DeadLettersExpiring",
        "none is left for a while",
        {DEAD_LETTERS: "1x100 0x8 1x600"},
        at="500h",
        every="1h",
    ),
    fires(
        "MessagesReturned", "one, up to the limit", {RETURNED: "0+1x20 20x60"}, at="8m", queue="notifications"
    ),
    silent("MessagesReturned", "few, at a restart", {RETURNED: "0x10 5x90"}, at="8m"),
    fires("EmailsStuck", "none is sent", {OLDEST_EMAIL: "0+15x120", SENT: "9x120"}, at="25m"),
    silent("EmailsStuck", "the oldest is not old", {OLDEST_EMAIL: "600x120", SENT: "9x120"}, at="25m"),
    silent(
        "EmailsStuck", "one waits, another went", {OLDEST_EMAIL: "0+15x120", SENT: "9x50 10x70"}, at="25m"
    ),
    silent("EmailsStuck", "nothing to send", {OLDEST_EMAIL: "0x120", SENT: "9x120"}, at="25m"),
    fires("EmailsFailing", "half", {SENT: "0+1x240", REFUSED: "0+1x240"}, at="30m"),
    fires("EmailsFailing", "none can be made", {SENT: "0x240", INTERNAL_ERROR: "0+1x240"}, at="30m"),
    silent("EmailsFailing", "one in twenty", {SENT: "0+19x240", REFUSED: "0+1x240"}, at="30m"),
    silent("EmailsFailing", "one of two", {SENT: "0 1x240", REFUSED: "0 1x240"}, at="30m"),
    silent("EmailsFailing", "refused for now", {SENT: "0+1x240", POSTPONED: "0+9x240"}, at="30m"),
    fires(
        "ReconciliationDiscrepancy",
        "a wrong sequence",
        {DISCREPANCIES: "1x60"},
        at="11m",
        kind="sequence_wrong",
    ),
    silent("ReconciliationDiscrepancy", "all adds up", {DISCREPANCIES: "0x60"}, at="11m"),
    fires("ReconciliationNotRun", "never again", {RECONCILED: "0x320"}, at="75m"),
    fires("ReconciliationNotRun", "never since the start", {RECONCILED: NOT_COUNTED}, at="12m"),
    silent("ReconciliationNotRun", "not yet", {RECONCILED: " ".join(["NaN"] * 20 + ["300"] * 40)}, at="12m"),
    silent("ReconciliationNotRun", "every time", {RECONCILED: "0+15x320"}, at="75m"),
    silent("EngineNotWatched", "all are", watched(*ALL_ENGINES), at="17m"),
    *(
        fires(
            "EngineNotWatched",
            f"{engine} is not",
            watched(*ALL_ENGINES.keys() - {engine}),
            at="16m",
            engine=engine,
        )
        for engine in ALL_ENGINES
    ),
    fires("PostgresStandbyMissing", "one is left", {STANDBYS: "1x60"}, at="11m"),
    silent("PostgresStandbyMissing", "both are there", {STANDBYS: "2x60"}, at="11m"),
    silent("PostgresStandbyMissing", "a rollout", {STANDBYS: "2x5 1x20 2x40"}, at="12m"),
    silent(
        "PostgresStandbyMissing",
        "standbys have none themselves",
        {f'{STANDBYS}{{pod="1"}}': "2x60", f'{STANDBYS}{{pod="2"}}': "0x60"},
        at="11m",
    ),
    fires("PostgresLogNotArchived", "it fails", {NOT_ARCHIVED: "0+15x80", ARCHIVED: "0x80"}, at="16m"),
    silent(
        "PostgresLogNotArchived", "it failed once", {NOT_ARCHIVED: "60x80", ARCHIVED: "0+15x80"}, at="20m"
    ),
    silent(
        "PostgresLogNotArchived", "it never failed", {NOT_ARCHIVED: "-1x80", ARCHIVED: "0+15x80"}, at="20m"
    ),
    fires("PostgresBackupTooOld", "two nights ago", {BACKED_UP: "-172800x320"}, at="62m"),
    silent("PostgresBackupTooOld", "last night", {BACKED_UP: "-50000x320"}, at="70m"),
    fires(
        "EngineDiskFull",
        "a tenth is free",
        {FREE: "1x60", SIZE: "10x60", "build_info": "1x60"},
        at="11m",
        persistentvolumeclaim="postgres-1-wal",
    ),
    silent("EngineDiskFull", "half is free", {FREE: "5x60", SIZE: "10x60", "build_info": "1x60"}, at="11m"),
    silent("EngineDiskFull", "of another installation", {FREE: "1x60", SIZE: "10x60"}, at="11m"),
    fires("RabbitmqNodeMissing", "one is", nodes(2), at="11m"),
    silent("RabbitmqNodeMissing", "none is", nodes(3), at="11m"),
    fires("QueueMemberMissing", "one is", members(2), at="91m", queue="notifications"),
    silent("QueueMemberMissing", "none is", members(3), at="91m"),
    fires("QueueMemberMissing", "one is, before 4.1", members_before_4_1(2), at="91m", queue="notifications"),
    silent("QueueMemberMissing", "none is, before 4.1", members_before_4_1(3), at="91m"),
    fires(
        "QueueMemberMissing",
        "one is, and the others export both",
        members(2) | members_before_4_1(2),
        at="91m",
        queue="notifications",
    ),
    silent(
        "QueueMemberMissing",
        "none is, halfway through an upgrade",
        {**members(2), **members_before_4_1(3)},
        at="91m",
    ),
]
# Times at which the first story that makes an alert fire has begun, but not lasted long enough.
TOO_EARLY = {
    "BackgroundWorkFailing": "3m",
    "ProcessAbsent": "4m",
    "PostgresUnavailable": "2m",
    "PostgresLoginRejected": "2m",
    "PostgresPoolSaturated": "8m",
    "ApiErrorRate": "4m",
    "ApiUnavailable": "2m",
    "ApiSlow": "8m",
    "JwksStale": "33m",
    "RelayNotConnected": "1m30s",
    "BrokerBlocked": "1m30s",
    "OutboxNotDraining": "5m",
    "EventsRetrying": "4m",
    "ConsumerNotReading": "1m30s",
    "MessagesReturned": "3m",
    "DeadLettersExpiring": "479h",
    "EmailsStuck": "18m",
    "EmailsFailing": "4m",
    "ReconciliationDiscrepancy": "8m",
    "ReconciliationNotRun": "65m",
    "EngineNotWatched": "14m",
    "PostgresStandbyMissing": "9m",
    "PostgresLogNotArchived": "14m",
    "PostgresBackupTooOld": "59m",
    "EngineDiskFull": "9m",
    "RabbitmqNodeMissing": "9m",
    "QueueMemberMissing": "89m",
}
FIRST_TO_FIRE = {case.alert: case for case in reversed(CASES) if case.fires}
CASES += [
    msgspec.structs.replace(FIRST_TO_FIRE[alert], story="too early", at=at, fires=())
    for alert, at in TOO_EARLY.items()
]


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_fires_when_it_should(alert, tmp_path):
    cases = [case for case in CASES if case.alert == alert]
    (every,) = {case.every for case in cases}

    run_tests([{"name": alert, "rules": [ALERTS[alert]]}], map(unit_test_of, cases), tmp_path, every=every)


def unit_test_of(case: Case) -> dict[str, Any]:
    """Return a case as promtool reads it."""
    rule = ALERTS[case.alert]
    labels = {"alertname": case.alert, "alertstate": "firing", **rule["labels"]}
    if "namespace" in rule["expr"]:
        labels["namespace"] = "here"
    samples = [
        {"labels": f"ALERTS{{{','.join(matchers(labels | more))}}}", "value": 1} for more in case.fires
    ]
    query = f'ALERTS{{alertname="{case.alert}",alertstate="firing"}}'
    return {
        "name": f"{case.alert}: {case.story}",
        "input_series": [
            {"series": of_target(name), "values": values} for name, values in case.series.items()
        ],
        "promql_expr_test": [{"expr": query, "eval_time": case.at, "exp_samples": samples}],
    }


JOBS = {"cnpg_": "-postgres", "barman_": "-postgres", "rabbitmq_": "-rabbitmq"}


def of_target(series: str) -> str:
    """Return a series with the labels that Prometheus's operator adds."""
    name, _, own = series.rstrip("}").partition("{")
    engine = next((ours for prefix, ours in JOBS.items() if name.startswith(prefix)), "")
    added = {"job": f"here/calculation-requests{engine}", "namespace": "here"}
    if "pod=" not in own:
        added["pod"] = "1"
    return f"{name}{{{','.join([*filter(None, [own]), *matchers(added)])}}}"


def matchers(labels: dict[str, str]) -> list[str]:
    """Return labels as PromQL writes them."""
    return [f'{label}="{value}"' for label, value in labels.items()]


def test_every_alert_is_seen_to_fire_and_to_be_silent():
    assert {case.alert for case in CASES if case.fires} == ALERTS.keys()
    assert {case.alert for case in CASES if not case.fires} == ALERTS.keys()
    assert {alert for alert, rule in ALERTS.items() if "for" in rule} == TOO_EARLY.keys()


def test_rules_are_well_formed(tmp_path):
    assert f"{len(ALERTS)} rules found" in check_rules(GROUPS, tmp_path)


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_asks_for_what_is_exported(alert):
    assert not_exported(ALERTS[alert]["expr"]) == set()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}: {case.story}")
def test_made_up_series_are_like_those_exported(case):
    assert [not_exported(series) for series in case.series] == [set()] * len(case.series)


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_says_how_urgent_it_is_what_is_wrong_and_where_its_runbook_is(alert):
    rule = ALERTS[alert]
    texts = f"{rule['annotations']['summary']} {rule['annotations']['description']}"
    fired = [case.fires[0] for case in CASES if case.alert == alert and case.fires]

    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["labels"]["service"] == "calculation-requests"
    assert rule["annotations"]["runbook_url"].endswith(f"deploy/runbook.md#{alert.lower()}")
    assert f"\n### {alert}\n" in RUNBOOK.read_text()
    for label in re.findall(r"\$labels\.(\w+)", texts):
        assert all(label in labels for labels in fired)
