"""Every alert fires on made-up series when it should and only then, and has a section in the runbook."""

import re

import pytest

from tests.deploy.alerts import (
    ALERTS,
    GROUPS,
    RULES,
    Case,
    check_rules,
    labels_of,
    of_target,
    queries_of,
    see,
)
from tests.deploy.exported_metrics import not_exported
from worker.process import ROLES

LIVENESS = {"api": "http_requests_in_progress", **{name: role.liveness for name, role in ROLES.items()}}
ALL_ROLES = dict.fromkeys(LIVENESS.values(), "1x60")
RELAY, NOTIFICATIONS, CALCULATIONS = (LIVENESS[role] for role in ("relay", "notifications", "calculations"))
OLDEST_EVENT = "outbox_oldest_event_age_seconds"
HELD_BACK = "feed_held_back_seconds"
CALLS = 'http_request_duration_seconds_count{route="/v1/request",method="POST",status="200"}'
DURATIONS = CALLS.replace("count", "bucket").replace("}", ',le="SECONDS"}')
WAITS = 'postgres_pool_wait_seconds_bucket{le="SECONDS"}'
READS = CALLS.replace("POST", "GET")
FAILED = CALLS.replace("200", "500")
TURNED_AWAY = CALLS.replace("200", "503")
REFUSED_CALLS = CALLS.replace("200", "401")
IN_A_SECOND = DURATIONS.replace("SECONDS", "1.0")
DEAD_LETTERS = 'consumer_dead_letters{queue="notifications",pod="1"}'
NOT_COUNTED = " ".join(["NaN"] * 60)
RETURNED = 'consumer_messages_total{queue="notifications",outcome="returned"}'
DELAYS = 'email_delivery_seconds_bucket{le="300.0"}'
OVERDUE = 'reconciliation_discrepancies{kind="email_overdue"}'
SENT = 'emails_total{outcome="sent"}'
PENDING = "emails_pending"
REFUSED = 'emails_total{outcome="failed"}'
INTERNAL_ERROR = 'emails_total{outcome="internal_error"}'
FAILURES = 'background_failures_total{work="relay"}'
BOUNCED = 'bounces_total{fault="sender"}'
LOOKED = "bounces_look_age_seconds"
RECONCILED = "reconciliation_age_seconds"
STANDBYS = "cnpg_pg_replication_streaming_replicas"
NOT_ARCHIVED = "cnpg_pg_stat_archiver_last_failed_time"
ARCHIVED = "cnpg_pg_stat_archiver_last_archived_time"
OPEN_FOR = 'cnpg_backends_max_tx_duration_seconds{application_name="psql",state="idle in transaction"}'
WAITING = "cnpg_backends_waiting_total"
LAG = "cnpg_pg_replication_lag"
DEADLOCKS = 'cnpg_pg_stat_database_deadlocks{datname="calculation_requests"}'
XID_AGE = 'cnpg_pg_database_xid_age{datname="calculation_requests"}'
CLIENTS_WAITING = 'cnpg_pgbouncer_pools_cl_waiting{database="calculation_requests"}'
OF_ANOTHER_TEAM = 'rabbitmq_detailed_queue_messages{queue="another-teams"}'
BACKED_UP = "barman_cloud_cloudnative_pg_io_last_available_backup_timestamp"
FREE = 'kubelet_volume_stats_available_bytes{persistentvolumeclaim="postgres-1-wal"}'
SIZE = 'kubelet_volume_stats_capacity_bytes{persistentvolumeclaim="postgres-1-wal"}'
ENGINES = {
    "Postgres": STANDBYS,
    "poolers": CLIENTS_WAITING,
    "backups": BACKED_UP,
    "RabbitMQ": 'rabbitmq_detailed_queue_info{queue="notifications",membership="leader"}',
    "disks": FREE,
}
ALL_ENGINES = dict.fromkeys(ENGINES.values(), "1x80")


def fires(story: str, series: dict[str, str], *, at: float, every: str = "15s", **labels: str) -> Case:
    return Case(story=story, series=series, at=at, fires=[labels], every=every)


def silent(story: str, series: dict[str, str], *, at: float, every: str = "15s") -> Case:
    return Case(story=story, series=series, at=at, every=every)


def histogram(buckets: str, fast: int, slow: int, every: int) -> dict[str, str]:
    """Return how many take up to 0.1 s, up to a second, and any time, in each interval."""
    counts = {"0.1": fast, "1.0": slow, "+Inf": every}
    return {buckets.replace("SECONDS", seconds): f"0+{count}x80" for seconds, count in counts.items()}


def calls(in_time: str, failed: str) -> dict[str, str]:
    """Return series of calls: answered in a second, and answered 500."""
    return {CALLS: in_time, IN_A_SECOND: in_time, FAILED: failed}


def outage(*, calls_lost: int) -> dict[str, str]:
    """Return series of 40 calls a minute. After an hour, up to 120 fail in a row."""
    failed = [min(calls_lost, 40 * minute) for minute in (1, 2, 3)]
    in_time = [2400 + 40 * minute - lost for minute, lost in enumerate(failed, start=1)]
    return calls(
        f"0+40x60 {in_time[0]} {in_time[1]} {in_time[2]}+40x80",
        f"0x60 {failed[0]} {failed[1]} {failed[2]}x80",
    )


def emails(in_time: str, late: str, **more: str) -> dict[str, str]:
    """Return series of e-mails: accepted in five minutes, later, and others by outcome."""
    count = DELAYS.partition("_bucket")[0] + "_count"
    of_pods = {of_pod(f"{count}{{}}", 1): in_time, DELAYS.replace("}", ',pod="1"}'): in_time}
    of_pods |= {of_pod(f"{count}{{}}", 2): late, DELAYS.replace("}", ',pod="2"}'): "0x6000"}
    failing = {f'emails_total{{outcome="{outcome}"}}': values for outcome, values in more.items()}
    return of_pods | {REFUSED: "0x6000"} | failing


def of_pod(series: str, pod: int) -> str:
    return series.replace("}", f',pod="{pod}"}}').replace("{,", "{")


def matched(series: str) -> dict[str, str]:
    """Return the labels of a series, which `absent` keeps."""
    return dict(re.findall(r'(\w+)="([^"]*)"', series))


def without(name: str, series: dict[str, str]) -> dict[str, str]:
    return {each: values for each, values in series.items() if each != name}


def nodes(count: int) -> dict[str, str]:
    """Return the series of *count* RabbitMQ nodes, each scraped at two paths."""
    return {
        f'rabbitmq_build_info{{pod="{pod}",erlang_version="{path}"}}': "1x60"
        for pod in range(count)
        for path in (1, 2)
    }


def members(count: int, vhost: str = "/") -> dict[str, str]:
    """Return the series of *count* nodes that hold a queue, and of those that only know of it."""
    membership = [*["leader"][:count], *["follower"] * (count - 1), *["undefined"] * (3 - count)]
    queue = f'vhost="{vhost}",queue="notifications"'
    return {
        f'rabbitmq_detailed_queue_info{{instance="{node}",{queue},membership="{one}"}}': "1x400"
        for node, one in enumerate(membership)
    }


def members_before_4_1(count: int) -> dict[str, str]:
    """Return the series of *count* nodes of an older RabbitMQ that hold a queue."""
    return {
        f'rabbitmq_detailed_raft_term_total{{instance="{node}",vhost="/",queue="notifications"}}': "1x400"
        for node in range(count)
    }


SELDOM = " ".join(f"{number}x9" for number in range(40))
LATE = {OVERDUE: "0x5 5000x400"}


CASES: dict[str, list[Case]] = {
    "ApiBudgetBurning": [
        fires("2 %", calls("0+98x60", "0+2x60"), at=20, every="1m"),
        fires("2 % take over a second", calls("0+98x60", "0x60") | {READS: "0+2x60"}, at=20, every="1m"),
        fires("all since the start", {FAILED: "0+2x60"}, at=20, every="1m"),
        silent("a failover of 30 seconds", outage(calls_lost=20), at=63, every="1m"),
        fires("an outage of three minutes", outage(calls_lost=120), at=65, every="1m"),
        silent("refusals", {**calls("0+1x60", "0x60"), REFUSED_CALLS: "0+99x60"}, at=20, every="1m"),
        silent("one timeout, after a quiet hour", calls("_x60 1+1x60", "_x70 1x50"), at=72, every="1m"),
        fires("all, at a call in ten minutes", calls("0x400", SELDOM), at=180, every="1m"),
    ],
    "ApiBudgetBurningSlowly": [
        fires("0.2 %, for days", calls("0+998x240", "0+2x240"), at=7 * 60, every="2m"),
        silent("0.05 %, for days", calls("0+1999x240", "0+1x240"), at=7 * 60, every="2m"),
    ],
    "EmailBudgetBurning": [
        fires(
            "5,000 are six hours late, others go",
            LATE | emails("0+4x400", "0x400"),
            at=6 * 60 + 5,
            every="1m",
        ),
        silent(
            "a full mailbox in a quiet night",
            emails("0x400", "0x400", postponed="0+1x400"),
            at=6 * 60,
            every="1m",
        ),
        fires("a tenth is late", emails("0+9x60", "0+1x60"), at=20, every="1m"),
        fires("taken for spam", emails("0+1x60", "0x60", failed="0+1x60"), at=20, every="1m"),
        fires("taken for spam later", emails("0+1x60", "0x60") | {BOUNCED: "0+1x60"}, at=20, every="1m"),
        silent("wrong addresses", emails("0+1x60", "0x60", recipient_refused="0+1x60"), at=20, every="1m"),
    ],
    "EmailBudgetBurningSlowly": [
        fires("1 % are late, for days", emails("0+99x240", "0+1x240"), at=7 * 60, every="2m"),
        silent("0.2 % are late, for days", emails("0+499x240", "0+1x240"), at=7 * 60, every="2m"),
    ],
    "ProcessAbsent": [
        silent("all roles are run", ALL_ROLES, at=10),
        *(
            fires(f"no {role}", without(name, ALL_ROLES), at=6, role=role, **matched(name))
            for role, name in LIVENESS.items()
        ),
    ],
    "PostgresUnavailable": [
        fires("down", {"postgres_unavailable_total": "0+5x40"}, at=5),
        silent("failover of 30 seconds", {"postgres_unavailable_total": "0 9 99x40"}, at=3.25),
    ],
    "PostgresLoginRejected": [
        fires("it is", {"postgres_login_rejected": "0 1x40"}, at=4),
        silent("it is not", {"postgres_login_rejected": "0x40"}, at=5),
    ],
    "PostgresPoolSaturated": [
        fires("half wait long", histogram(WAITS, 5, 10, 10), at=15),
        silent("few wait long", histogram(WAITS, 995, 1000, 1000), at=15),
    ],
    "BackgroundWorkFailing": [
        fires("every minute", {FAILURES: "0+1x160"}, at=9, work="relay"),
        silent("once", {FAILURES: "0x20 1x140"}, at=20),
    ],
    "SecretKeyMissing": [
        fires("one request", {"request_secret_keys_missing_total": "0x10 1x50"}, at=4),
        silent("none", {"request_secret_keys_missing_total": "0x60"}, at=4),
    ],
    "ApiErrorRate": [
        fires("2 %", {CALLS: "0+98x60", FAILED: "0+2x60"}, at=10),
        silent("0.5 %", {CALLS: "0+199x60", FAILED: "0+1x60"}, at=10),
        silent("503 does not count", {CALLS: "0+50x60", TURNED_AWAY: "0+50x60"}, at=10),
    ],
    "ApiSlow": [
        fires("2 % over a second", histogram(DURATIONS, 50, 98, 100), at=16),
        silent("0.2 % over 0.1 s", histogram(DURATIONS, 998, 1000, 1000), at=16),
    ],
    "JwksStale": [
        fires("not fetched", {"jwks_age_seconds": "0+15x200"}, at=40),
        silent("fetched every 5 minutes", {"jwks_age_seconds": "0+15x20 0+15x20"}, at=10),
    ],
    "RelayNotConnected": [
        fires("none is", {RELAY: "1 0x20"}, at=3),
        silent("one of two is not", {of_pod(RELAY, 1): "0x20", of_pod(RELAY, 2): "1x20"}, at=5),
    ],
    "BrokerBlocked": [
        fires("an alarm", {"broker_blocked": "0 1x20"}, at=3),
        silent("for a minute", {"broker_blocked": "0 1x4 0x10"}, at=3),
    ],
    "OutboxNotDraining": [
        fires("the oldest gets older", {OLDEST_EVENT: "0+15x60"}, at=10),
        silent("the oldest is young", {OLDEST_EVENT: "0 30x60"}, at=10),
    ],
    "EventsRetrying": [
        fires("one is", {"outbox_retrying_events": "1x60"}, at=6),
        silent("mended after four minutes", {"outbox_retrying_events": "1x16 0x40"}, at=6),
    ],
    "FeedHeldBack": [
        fires("for six minutes", {HELD_BACK: "0+15x60"}, at=6),
        silent("for four", {HELD_BACK: "0+15x16 0x40"}, at=6),
    ],
    "ConsumerNotReading": [
        fires("one queue", {NOTIFICATIONS: "0x20", CALCULATIONS: "1x20"}, at=3),
        silent(
            "one of two readers", {of_pod(NOTIFICATIONS, 1): "0x20", of_pod(NOTIFICATIONS, 2): "1x20"}, at=5
        ),
    ],
    "MessagesDeadLettered": [
        fires("one comes", {DEAD_LETTERS: "0x10 1x50"}, at=2.75),
        fires(
            "one of two processes counts it",
            {DEAD_LETTERS: "1x60", DEAD_LETTERS.replace('pod="1"', 'pod="2"'): NOT_COUNTED},
            at=10,
        ),
        fires("a short outage of the broker", {DEAD_LETTERS: f"1x20 {' '.join(['NaN'] * 16)} 1x20"}, at=8),
        silent("none is left", {DEAD_LETTERS: "1x10 0x60"}, at=8),
    ],
    "DeadLettersExpiring": [
        fires(
            "there are always some, but for an outage",
            {DEAD_LETTERS: "1x100 NaN NaN NaN 2x600"},
            at=481 * 60,
            every="1h",
        ),
        silent("none is left for a while", {DEAD_LETTERS: "1x100 0x8 1x600"}, at=500 * 60, every="1h"),
    ],
    "MessagesReturned": [
        fires("one, up to the limit", {RETURNED: "0+1x20 20x60"}, at=4),
        silent("few, at a restart", {RETURNED: "0x10 5x90"}, at=8),
    ],
    "EmailsNotSent": [
        fires(
            "our sender's domain is refused, from the tenth minute on",
            {PENDING: "0x40 0+1x200", SENT: "0+1x40 40x200"},
            at=19.5,
        ),
        silent("mailboxes are full, in a quiet night", {PENDING: "80x240", SENT: "9x240"}, at=40),
        silent("Postgres is away", {PENDING: NOT_COUNTED, SENT: "9x60"}, at=12),
    ],
    "EmailsFailing": [
        fires("half", {SENT: "0+1x240", REFUSED: "0+1x240"}, at=9),
        fires("none can be made", {SENT: "0x240", INTERNAL_ERROR: "0+1x240"}, at=9),
        silent("one in twenty", {SENT: "0+19x240", REFUSED: "0+1x240"}, at=30),
    ],
    "EmailsBouncing": [
        fires("our domain is not trusted", {SENT: "0+1x240", BOUNCED: "0+1x240"}, at=9),
        silent("one in twenty", {SENT: "0+20x240", BOUNCED: "0+1x240"}, at=30),
    ],
    "BouncesNotRead": [
        fires("never again", {LOOKED: "0+15x120"}, at=21),
        silent("BOUNCES_URL is not set", {LOOKED: " ".join(["NaN"] * 120)}, at=21),
        silent("every minute", {LOOKED: "60x120"}, at=21),
    ],
    "ReconciliationDiscrepancy": [
        fires(
            "a request without an e-mail",
            {'reconciliation_discrepancies{kind="request_without_email"}': "1x60"},
            at=11,
            kind="request_without_email",
        ),
        silent("all adds up", {'reconciliation_discrepancies{kind="request_without_email"}': "0x60"}, at=11),
    ],
    "ReconciliationNotRun": [
        fires("never again", {RECONCILED: "0+15x320"}, at=75),
        silent("not yet", {RECONCILED: " ".join(["NaN"] * 20 + ["0"] * 40)}, at=12),
        silent("every time", {RECONCILED: "300x320"}, at=75),
    ],
    "EngineNotWatched": [
        silent("all are", ALL_ENGINES, at=17),
        *(
            fires(f"{engine} is not", without(name, ALL_ENGINES), at=16, engine=engine)
            for engine, name in ENGINES.items()
        ),
    ],
    "PostgresStandbyMissing": [
        fires("one is left", {STANDBYS: "1x60"}, at=11),
        silent(
            "standbys have none themselves",
            {f'{STANDBYS}{{pod="1"}}': "2x60", f'{STANDBYS}{{pod="2"}}': "0x60"},
            at=11,
        ),
    ],
    "PostgresTransactionOpen": [
        fires("for an hour", {OPEN_FOR: "0+30x120"}, at=22, every="30s", application_name="psql"),
        silent("many short ones", {OPEN_FOR: "5x120"}, at=22, every="30s"),
    ],
    "PostgresSessionsWaiting": [
        fires("many wait", {WAITING: "0 20x60"}, at=6),
        silent("for a minute", {WAITING: "0 20x4 0x60"}, at=6),
    ],
    "PostgresStandbyLagging": [
        fires("more and more", {LAG: "0+15x60"}, at=10),
        silent("a little", {LAG: "2x60"}, at=10),
    ],
    "PostgresDeadlocks": [
        fires("again and again", {DEADLOCKS: "0x20 0+1x60"}, at=8, datname="calculation_requests"),
        silent("one", {DEADLOCKS: "0x20 1x60"}, at=8),
    ],
    "PostgresTransactionIdsOld": [
        fires("not frozen", {XID_AGE: "400000000x320"}, at=61, datname="calculation_requests"),
        silent("soon frozen", {XID_AGE: "190000000x320"}, at=61),
    ],
    "PoolerQueueing": [
        fires("two poolers", {of_pod(CLIENTS_WAITING, 1): "0x60", of_pod(CLIENTS_WAITING, 2): "3x60"}, at=6),
        silent("now and then", {CLIENTS_WAITING: "9x4 0 9x4 0 9x4 0 9x4 0 9x4 0"}, at=6),
    ],
    "PostgresLogNotArchived": [
        fires("it fails", {NOT_ARCHIVED: "0+15x80", ARCHIVED: "0x80"}, at=16),
        silent("it failed once", {NOT_ARCHIVED: "60x80", ARCHIVED: "0+15x80"}, at=20),
    ],
    "PostgresBackupTooOld": [
        fires("two nights ago", {BACKED_UP: "-172800x320"}, at=62),
        silent("last night", {BACKED_UP: "-50000x320"}, at=70),
    ],
    "EngineDiskFull": [
        fires(
            "a tenth is free",
            {FREE: "1x60", SIZE: "10x60", "build_info": "1x60"},
            at=11,
            persistentvolumeclaim="postgres-1-wal",
        ),
        silent("half is free", {FREE: "5x60", SIZE: "10x60", "build_info": "1x60"}, at=11),
        silent("of another installation", {FREE: "1x60", SIZE: "10x60"}, at=11),
    ],
    "RabbitmqNodeMissing": [
        fires("one is", nodes(2), at=11),
        silent("none is", nodes(3), at=11),
    ],
    "QueueMemberMissing": [
        fires("one is", members(2), at=91, vhost="/"),
        silent("none is", members(3), at=91),
        fires("one is, before 4.1", members_before_4_1(2), at=91, vhost="/"),
        fires("one is, but not in another virtual host", members(2) | members(3, "b"), at=91, vhost="/"),
    ],
    "QueueGrowing": [
        fires("nobody reads it", {OF_ANOTHER_TEAM: "0+100x400"}, at=72, queue="another-teams"),
        silent("read once in an hour", {OF_ANOTHER_TEAM: "0+100x200 0+100x200"}, at=80),
        silent("dead letters", {OF_ANOTHER_TEAM.replace("teams", "teams.dead-letters"): "0+100x400"}, at=72),
    ],
}


def test_alerts_fire_when_they_should_and_only_then(tmp_path):
    see(CASES, tmp_path)


def test_every_alert_is_seen_to_fire_and_to_be_silent():
    assert CASES.keys() == ALERTS.keys()
    for alert, cases in CASES.items():
        assert {bool(case.fires) for case in cases} == {True, False}, alert


def test_rules_are_well_formed(tmp_path):
    assert f"{len(RULES)} rules found" in check_rules(GROUPS, tmp_path)


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_asks_for_what_is_exported_and_so_do_its_made_up_series(alert):
    queries = [*queries_of(alert), *(of_target(name) for case in CASES[alert] for name in case.series)]

    assert [query for query in queries if not_exported(query)] == []


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_says_how_urgent_it_is_what_is_wrong_and_where_its_runbook_is(alert):
    rule = ALERTS[alert]
    texts = f"{rule['annotations']['summary']} {rule['annotations']['description']}"

    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["labels"]["service"] == "calculation-requests"
    assert rule["annotations"]["runbook_url"].endswith(f"deploy/runbook.md#{alert.lower()}")
    named = {*re.findall(r"\$labels\.(\w+)", texts)}
    assert all(named <= labels_of(alert, labels).keys() for case in CASES[alert] for labels in case.fires)
