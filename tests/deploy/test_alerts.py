"""Each alert fires on made-up series when it should and only then, and is in the runbook; the dashboard."""

import re

import pytest

from tests.deploy import alerts
from tests.deploy.alerts import ALERTS, RECORDINGS, RULES, TOP, Case, not_exported
from tests.deploy.pages import RUNBOOK, alert_entries, anchors
from worker.process import ROLES

LIVENESS = {"api": "http_requests_in_progress", **{name: role.liveness for name, role in ROLES.items()}}
ALL_ROLES = dict.fromkeys(LIVENESS.values(), "1x60")
RELAY, NOTIFICATIONS, CALCULATIONS = (LIVENESS[role] for role in ("relay", "notifications", "calculations"))
CALLS = 'http_request_duration_seconds_count{route="/v1/request",method="POST",status="200"}'
DURATIONS = CALLS.replace("count", "bucket").replace("}", ',le="SECONDS"}')
WAITS = 'postgres_pool_wait_seconds_bucket{le="SECONDS"}'
FAILED = CALLS.replace("200", "500")
DEAD_LETTERS = 'consumer_dead_letters{queue="notifications"}'
NOT_COUNTED = " ".join(["NaN"] * 60)
SENT, REFUSED = 'emails_total{outcome="sent"}', 'emails_total{outcome="failed"}'
SELDOM = " ".join(f"{number}x9" for number in range(40))
LATE = {'reconciliation_discrepancies{kind="email_overdue"}': "0x5 5000x400"}
RETURNED = 'consumer_messages_total{queue="notifications",outcome="returned"}'
BOUNCED = 'bounces_total{fault="sender"}'
FAILURES = 'background_failures_total{work="relay"}'
STANDBYS = "cnpg_pg_replication_streaming_replicas"
OPEN_FOR = 'cnpg_backends_max_tx_duration_seconds{application_name="psql",state="idle in transaction"}'
ARCHIVED, NOT_ARCHIVED = "cnpg_pg_stat_archiver_last_archived_time", "cnpg_pg_stat_archiver_last_failed_time"
CLIENTS_WAITING = 'cnpg_pgbouncer_pools_cl_waiting{database="calculation_requests"}'
OF_ANOTHER_TEAM = 'rabbitmq_detailed_queue_messages{queue="another-teams"}'
BACKED_UP = "barman_cloud_cloudnative_pg_io_last_available_backup_timestamp"
DEADLOCKS = 'cnpg_pg_stat_database_deadlocks{datname="calculation_requests"}'
XID_AGE = 'cnpg_pg_database_xid_age{datname="calculation_requests"}'
FREE = 'kubelet_volume_stats_available_bytes{persistentvolumeclaim="postgres-1-wal"}'
SIZE = FREE.replace("available", "capacity")
TERM = 'rabbitmq_detailed_raft_term_total{vhost="/",queue="notifications"}'
ENGINES = {
    "Postgres": STANDBYS,
    "poolers": CLIENTS_WAITING,
    "backups": BACKED_UP,
    "RabbitMQ": 'rabbitmq_detailed_queue_info{queue="notifications",membership="leader"}',
    "disks": FREE,
}
ALL_ENGINES = dict.fromkeys(ENGINES.values(), "1x80")
QUERIES: list[str] = [target["expr"] for panel in alerts.PANELS for target in panel["targets"]]
silent = Case


def fires(story: str, series: dict[str, str], at: float, **labels: str) -> Case:
    return Case(story, series, at, [labels])


def either(series: str, firing: tuple[str, float], quiet: tuple[str, float], **labels: str) -> list[Case]:
    """Return values of one series with which an alert fires at a minute, and some with which it is silent.

    Those of several pods are separated by bars.
    """
    loud, still = (of_pods(series, *values.split(" | ")) for values, _ in (firing, quiet))
    return [fires(firing[0], loud, firing[1], **labels), silent(quiet[0], still, quiet[1])]


def histogram(buckets: str, *counts: int) -> dict[str, str]:
    """Return how many take up to 0.1 s, up to a second, and any time, in each interval."""
    limits = zip(("0.1", "1.0", "+Inf"), counts, strict=True)
    return {buckets.replace("SECONDS", seconds): f"0+{count}x80" for seconds, count in limits}


def calls(in_time: str, failed: str) -> dict[str, str]:
    """Return series of calls: answered in a second, and answered 500."""
    return {CALLS: in_time, DURATIONS.replace("SECONDS", "1.0"): in_time, FAILED: failed}


def emails(in_time: str, late: str, **others: str) -> dict[str, str]:
    """Return series of e-mails: accepted in five minutes, later by another pod, and others by outcome."""
    count, bucket = "email_delivery_seconds_count", 'email_delivery_seconds_bucket{le="300.0"}'
    of_outcomes = {SENT.replace("sent", outcome): others[outcome] for outcome in others}
    return (
        {REFUSED: "0x6000"} | of_outcomes | of_pods(count, in_time, late) | of_pods(bucket, in_time, "0x6000")
    )


def of_pods(series: str, *values: str) -> dict[str, str]:
    name, _, labels = series.partition("{")
    return {f'{name}{{pod="{pod}",{labels or "}"}': each for pod, each in enumerate(values, 1)}


def nodes(count: int) -> dict[str, str]:
    """Return the series of *count* RabbitMQ nodes, each scraped at two paths."""
    paths = [f'rabbitmq_build_info{{erlang_version="{path}"}}' for path in (1, 2)]
    return {name: one for path in paths for name, one in of_pods(path, *["1x60"] * count).items()}


def members(count: int, vhost: str = "/") -> dict[str, str]:
    """Return the series of *count* nodes that hold a queue, and of those of three that only know of it."""
    held = ["leader", "follower", "follower"][:count] + ["undefined"] * (3 - count)
    of_queue = f'vhost="{vhost}",queue="notifications"'
    return {
        f'rabbitmq_detailed_queue_info{{instance="{node}",{of_queue},membership="{one}"}}': "1x400"
        for node, one in enumerate(held)
    }


# The intervals of samples that are not 15 s.
EVERY = {"ApiBudgetBurning": "1m", "ApiBudgetBurningSlowly": "2m", "PostgresTransactionOpen": "30s"}
EVERY |= {"EmailBudgetBurning": "1m", "EmailBudgetBurningSlowly": "2m", "DeadLettersExpiring": "1h"}
EVERY |= dict.fromkeys(("QueueMemberMissing", "QueueGrowing", "ReconciliationNotRun"), "1m")
EVERY |= dict.fromkeys(("PostgresBackupTooOld", "PostgresTransactionIdsOld"), "1m")
CASES: dict[str, list[Case]] = {
    "ApiBudgetBurning": [
        fires("2 %", calls("0+98x60", "0+2x60"), 20),
        fires("2 % are slow", {**calls("0+98x60", "0x60"), CALLS.replace("POST", "GET"): "0+2x60"}, 20),
        fires("all since the start", {FAILED: "0+2x60"}, 20),
        silent("a failover of 30 seconds", calls("0+40x60 2420+40x80", "0x60 20x80"), 63),
        fires("an outage of three minutes", calls("0+40x60 2400 2400 2400+40x80", "0x60 40 80 120x80"), 65),
        silent("refusals", {**calls("0+1x60", "0x60"), CALLS.replace("200", "401"): "0+99x60"}, 20),
        silent("one timeout, after a quiet hour", calls("_x60 1+1x60", "_x70 1x50"), 72),
        fires("all, at a call in ten minutes", calls("0x400", SELDOM), 180),
    ],
    "ApiBudgetBurningSlowly": [
        fires("0.2 %, for days", calls("0+998x240", "0+2x240"), 7 * 60),
        silent("0.05 %, for days", calls("0+1999x240", "0+1x240"), 7 * 60),
    ],
    "EmailBudgetBurning": [
        fires("5,000 are six hours late, others go", LATE | emails("0+4x400", "0x400"), 6 * 60 + 5),
        silent("a full mailbox in a quiet night", emails("0x400", "0x400", postponed="0+1x400"), 6 * 60),
        fires("a tenth is late", emails("0+9x60", "0+1x60"), 20),
        fires("taken for spam", emails("0+1x60", "0x60", failed="0+1x60"), 20),
        fires("taken for spam later", {**emails("0+1x60", "0x60"), BOUNCED: "0+1x60"}, 20),
        silent(
            "wrong addresses, some of which bounce",
            emails("0+1x60", "0x60", recipient_refused="0+1x60")
            | {BOUNCED: "0x60", BOUNCED.replace("sender", "recipient"): "0+1x60"},
            20,
        ),
    ],
    "EmailBudgetBurningSlowly": [
        fires("1 % are late, for days", emails("0+99x240", "0+1x240"), 7 * 60),
        silent("0.2 % are late, for days", emails("0+499x240", "0+1x240"), 7 * 60),
    ],
    "ProcessAbsent": [
        silent("all roles are run", ALL_ROLES, 10),
        *(
            # `absent` keeps the labels of the series that it looks for.
            fires(
                f"no {role}",
                {**ALL_ROLES, name: "_x60"},
                6,
                role=role,
                **dict(re.findall(r'(\w+)="(.*?)"', name)),
            )
            for role, name in LIVENESS.items()
        ),
    ],
    "PostgresUnavailable": either("postgres_unavailable_total", ("0+5x40", 5), ("0 9 99x40", 3.25)),
    "PostgresLoginRejected": either("postgres_login_rejected", ("0 1x40", 4), ("0x40", 5)),
    "PostgresPoolSaturated": [
        fires("half wait long", histogram(WAITS, 5, 10, 10), 15),
        silent("few wait long", histogram(WAITS, 995, 1000, 1000), 15),
    ],
    "BackgroundWorkFailing": either(FAILURES, ("0+1x160", 9), ("0x20 1x140", 20)),
    "SecretKeyMissing": either("request_secret_keys_missing_total", ("0x10 1x50", 4), ("0x60", 4)),
    "ApiErrorRate": [
        fires("2 %", {CALLS: "0+98x60", FAILED: "0+2x60"}, 10),
        silent("0.5 %", {CALLS: "0+199x60", FAILED: "0+1x60"}, 10),
        silent("503 does not count", {CALLS: "0+50x60", CALLS.replace("200", "503"): "0+50x60"}, 10),
    ],
    "ApiSlow": [
        fires("2 % over a second", histogram(DURATIONS, 50, 98, 100), 16),
        silent("0.2 % over 0.1 s", histogram(DURATIONS, 998, 1000, 1000), 16),
    ],
    "JwksStale": either("jwks_age_seconds", ("0+15x200", 40), ("0+15x20 0+15x20", 10)),
    "RelayNotConnected": either(RELAY, ("1 0x20", 3), ("0x20 | 1x20", 5)),
    "BrokerBlocked": either("broker_blocked", ("0 1x20", 3), ("0 1x4 0x10", 3)),
    "OutboxNotDraining": either("outbox_oldest_event_age_seconds", ("0+15x60", 10), ("0 30x60", 10)),
    "EventsRetrying": either("outbox_retrying_events", ("1x60", 6), ("1x16 0x40", 6)),
    "FeedHeldBack": either("feed_held_back_seconds", ("0+15x60", 6), ("0+15x16 0x40", 6)),
    "ConsumerNotReading": [
        fires("one queue", {NOTIFICATIONS: "0x20", CALCULATIONS: "1x20"}, 3),
        silent("one of two readers", of_pods(NOTIFICATIONS, "0x20", "1x20"), 5),
    ],
    "MessagesDeadLettered": [
        fires("one comes", {DEAD_LETTERS: "0x10 1x50"}, 2.75),
        fires("one of two processes counts it", of_pods(DEAD_LETTERS, "1x60", NOT_COUNTED), 10),
        fires("a short outage of the broker", {DEAD_LETTERS: f"1x20 {' '.join(['NaN'] * 16)} 1x20"}, 8),
        silent("none is left", {DEAD_LETTERS: "1x10 0x60"}, 8),
    ],
    # There are always some, but for an outage; none is left for a while.
    "DeadLettersExpiring": either(
        DEAD_LETTERS, ("1x100 NaN NaN NaN 2x600", 481 * 60), ("1x100 0x8 1x600", 500 * 60)
    ),
    # One, up to the limit; few, at a restart.
    "MessagesReturned": either(RETURNED, ("0+1x20 20x60", 4), ("0x10 5x90", 8)),
    "EmailsNotSent": [
        fires("our domain is refused", {"emails_pending": "0x40 0+1x200", SENT: "0+1x40 40x200"}, 19.5),
        silent("mailboxes are full, in a quiet night", {"emails_pending": "80x240", SENT: "9x240"}, 40),
        silent("Postgres is away", {"emails_pending": NOT_COUNTED, SENT: "9x60"}, 12),
    ],
    "EmailsFailing": [
        fires("half", {SENT: "0+1x240", REFUSED: "0+1x240"}, 9),
        fires("none can be made", {SENT: "0x240", SENT.replace("sent", "internal_error"): "0+1x240"}, 9),
        silent("one in twenty", {SENT: "0+19x240", REFUSED: "0+1x240"}, 30),
    ],
    "EmailsBouncing": [
        fires("our domain is not trusted", {SENT: "0+1x240", BOUNCED: "0+1x240"}, 9),
        silent("one in twenty", {SENT: "0+20x240", BOUNCED: "0+1x240"}, 30),
    ],
    "BouncesNotRead": [
        *either("bounces_look_age_seconds", ("0+15x120", 21), ("60x120", 21)),
        silent("BOUNCES_URL is not set", {"bounces_look_age_seconds": " ".join(["NaN"] * 120)}, 21),
    ],
    "ReconciliationDiscrepancy": either(
        'reconciliation_discrepancies{kind="request_without_email"}', ("1x60", 11), ("0x60", 11)
    ),
    "ReconciliationNotRun": [
        *either("reconciliation_age_seconds", ("0+60x80", 75), ("300x80", 75)),
        silent("not yet", {"reconciliation_age_seconds": "NaN NaN NaN NaN NaN 0x40"}, 12),
    ],
    "EngineNotWatched": [
        silent("all are", ALL_ENGINES, 17),
        *(
            fires(f"{engine} is not", {**ALL_ENGINES, name: "_x80"}, 16, engine=engine)
            for engine, name in ENGINES.items()
        ),
    ],
    "PostgresStandbyMissing": either(STANDBYS, ("1x60", 11), ("2x60 | 0x60", 11)),
    # For an hour; many short ones.
    "PostgresTransactionOpen": either(OPEN_FOR, ("0+30x120", 22), ("5x120", 22)),
    "PostgresSessionsWaiting": either("cnpg_backends_waiting_total", ("0 20x60", 6), ("0 20x4 0x60", 6)),
    "PostgresStandbyLagging": either("cnpg_pg_replication_lag", ("0+15x60", 10), ("2x60", 10)),
    "PostgresDeadlocks": either(DEADLOCKS, ("0x20 0+1x60", 8), ("0x20 1x60", 8)),
    "PostgresTransactionIdsOld": either(XID_AGE, ("400000000x80", 61), ("190000000x80", 61)),
    "PoolerQueueing": either(CLIENTS_WAITING, ("0x60 | 3x60", 6), ("9x4 0 9x4 0 9x4 0 9x4 0 9x4 0", 6)),
    "PostgresLogNotArchived": [
        fires("it fails", {NOT_ARCHIVED: "0+15x80", ARCHIVED: "0x80"}, 16),
        silent("it failed once", {NOT_ARCHIVED: "60x80", ARCHIVED: "0+15x80"}, 20),
    ],
    "PostgresBackupTooOld": either(BACKED_UP, ("-172800x80", 62), ("-50000x80", 70)),
    "EngineDiskFull": [
        fires("a tenth is free", {FREE: "1x60", SIZE: "10x60", "build_info": "1x60"}, 11),
        silent("half is free", {FREE: "5x60", SIZE: "10x60", "build_info": "1x60"}, 11),
        silent("of another installation", {FREE: "1x60", SIZE: "10x60"}, 11),
    ],
    "RabbitmqNodeMissing": [fires("one is", nodes(2), 11), silent("none is", nodes(3), 11)],
    "QueueMemberMissing": [
        fires("one is", members(2), 91),
        silent("none is", members(3), 91),
        fires("one is, before 4.1", of_pods(TERM, "1x400", "1x400"), 91),
        fires("one is, but not in another virtual host", members(2) | members(3, "b"), 91),
    ],
    "QueueGrowing": [
        # Nobody reads it; it is read once in an hour.
        *either(OF_ANOTHER_TEAM, ("0+400x100", 72), ("0+400x50 0+400x50", 80), queue="another-teams"),
        silent("dead letters", {OF_ANOTHER_TEAM.replace("teams", "teams.dead-letters"): "0+400x100"}, 72),
    ],
}


def test_alerts_fire_when_they_should_and_only_then(tmp_path):
    seen = {alert: {bool(case.fires) for case in cases} for alert, cases in CASES.items()}

    assert seen == {alert: {True, False} for alert in ALERTS}
    alerts.see(CASES, tmp_path, EVERY)


def test_rules_and_queries_of_the_dashboard_are_well_formed(tmp_path):
    panels = [{"record": f"panel_{n}", "expr": alerts.filled_in(query)} for n, query in enumerate(QUERIES)]
    groups = [*alerts.GROUPS, {"name": "dashboard", "rules": panels}]
    rules = alerts.written(tmp_path / "rules.json", {"groups": groups})

    # Warnings, for instance about duplicates, are errors.
    printed = alerts.promtool("check", "rules", "--lint=all", "--lint-fatal", rules)
    assert f"{len(RULES) + len(QUERIES)} rules found" in printed


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_and_its_series_are_exported_and_it_says_how_urgent_it_is_and_where_its_runbook_is(alert):
    queries = [rule["expr"] for rule in alerts.rules_of(alert)]
    queries += [alerts.of_target(name) for case in CASES[alert] for name in case.series]
    labels, texts = ALERTS[alert]["labels"], ALERTS[alert]["annotations"]
    named = {*re.findall(r"\$labels\.(\w+)", f"{texts['summary']} {texts['description']}")}

    assert [query for query in queries if not_exported(query)] == []
    assert labels["severity"] in {"critical", "warning"}
    assert labels["service"] == "calculation-requests"
    assert texts["runbook_url"].endswith(f"deploy/runbook.md#{alert.lower()}")
    for given in (labels for case in CASES[alert] for labels in case.fires):
        assert named <= alerts.labels_of(alert, given).keys()


def test_page_has_an_entry_for_every_alert_and_a_reason_for_each_that_wakes_a_person_and_for_no_other():
    critical = [name for name, rule in ALERTS.items() if rule["labels"]["severity"] == "critical"]

    assert alert_entries().keys() == ALERTS.keys()
    assert {name.lower() for name in ALERTS} <= anchors(RUNBOOK)
    assert re.findall(r"^\| \[(\w+)\]\(#\w+\) \| \w", RUNBOOK.read_text(), re.MULTILINE) == critical


def test_limit_of_an_alert_on_the_page_is_that_of_its_rule():
    page = " ".join(RUNBOOK.read_text().split())
    for words, alert, limit in (
        ("over 1 % of the calls get 500", "ApiErrorRate", "> 0.01"),
        ("takes over half a second", "ApiSlow", "> 0.5"),
        ("not been fetched for half an hour", "JwksStale", "> 1800"),
        ("for five minutes, the oldest pending event", "OutboxNotDraining", "for: 5m"),
        ("more than a minute old", "OutboxNotDraining", "> 60"),
        ("dead letters for 20 days", "DeadLettersExpiring", "for: 20d"),
        ("a tenth of the last hour's e-mails failed", "EmailsFailing", "> 0.1"),
        ("a tenth of the last hour's e-mails were accepted", "EmailsBouncing", "> 0.1"),
        ("read the mailbox for 15 minutes", "BouncesNotRead", "> 900"),
        ("hold a replica, for 90 minutes", "QueueMemberMissing", "for: 90m"),
    ):
        assert words in page
        assert limit in f"{ALERTS[alert]['expr']} for: {ALERTS[alert].get('for')}", words


def test_dashboard_asks_for_what_is_exported_and_looks_at_one_installation():
    ours = ('job=~"$job"', 'job=~"(.*/)?calculation-requests-', 'persistentvolumeclaim=~"')
    assert not_exported('sum by (a, le) (b{job=~"c(d)"}) / rate(emails_total{e="f", pod!="1"}[5m])') == {
        *("a", "le", "b", "emails_total{e}")
    }
    for query in QUERIES:
        assert not_exported(alerts.filled_in(query)) == set()
        for name, selector in re.findall(r"([\w:]+)(\{[^}]*\})", query):
            assert 'namespace=~"$namespace"' in selector
            assert name in RECORDINGS or any(matcher in selector for matcher in ours), query


def test_dashboard_shows_only_the_objectives_at_first_and_every_metric_of_ours():
    first, *others = [panel for panel in TOP if panel["type"] == "row"]
    opened = str([panel["targets"] for panel in TOP if panel["type"] != "row"])
    shown, asked = (
        set(re.findall(r"\w+", " ".join(queries))) for queries in (QUERIES, [rule["expr"] for rule in RULES])
    )
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in alerts.our_metrics()}

    assert (first["title"], first["collapsed"]) == ("Objectives", False)
    assert all(row["collapsed"] and row["panels"] for row in others)
    assert {name for name in RECORDINGS if name in opened} == RECORDINGS.keys()
    assert {name for name in names if not shown & {name, f"{name}_bucket"}} == set()
    assert alerts.OF_ENGINES.keys() - shown - asked == set()
