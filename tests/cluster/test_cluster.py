"""`make cluster-check` with processes on this machine in place of pods, and what makes it fail."""

import stat
from functools import partial

import msgspec
import pytest

from service.identifiers import uuid_of
from tests.cluster.__main__ import Fault, run
from tests.cluster.kubernetes import CheckFailed, Cluster
from tests.cluster.local_cluster import LocalCluster
from tests.cluster.verdict import Create, Run, Stored
from tests.harness.processes import api_process, started, worker_process

_STORED = Stored("req_1", "calculation-of-req_1")
_RUN = Run(
    due=2.0,
    creates=[Create("run-0-1", "req_1"), Create("run-0-2", "req_2", ["503"])],
    stored={"run-0-1": _STORED, "run-0-2": Stored("req_2", "calculation-of-req_2")},
    recipients=["run-0-1@example.com", "run-0-2@example.com"],
    queued={"notifications": 0},
)


def test_run_that_lost_nothing_has_no_breach():
    assert [*_RUN.breaches()] == []
    assert _RUN.summary() == "2 creates, 0 e-mails repeated; tries that failed: 1 503"


@pytest.mark.parametrize(
    ("changes", "breach"),
    [
        ({"due": 2.6}, "2 creates, but 3 were due"),
        ({"creates": [Create("run-0-1", None, ["401"])] * 2}, "run-0-1 never got 200: ['401']"),
        ({"creates": [Create("run-0-1", "req_9")] * 2}, "run-0-1 got req_9, but req_1 is stored"),
        ({"stored": {**_RUN.stored, "run-0-1": Stored("req_1", None)}}, "run-0-1 has the calculation None"),
        ({"recipients": ["run-0-2@example.com"]}, "run-0-1@example.com: 0 e-mails"),
        ({"recipients": [*_RUN.recipients, "run-9-9@example.com"]}, "run-9-9@example.com: 1 e-mails"),
        ({"recipients": [*_RUN.recipients] * 2}, "2 e-mails were repeated, after 0 kills"),
        ({"queued": {"notifications.dead": 1}}, "notifications.dead has 1 messages"),
        ({"undelivered": 1}, "1 events are in the outbox"),
        ({"failed": ["kubectl get: timed out"]}, "kubectl get: timed out"),
    ],
)
def test_each_breach_is_found(changes, breach):
    assert {*msgspec.structs.replace(_RUN, **changes).breaches()} == {breach}


def test_run_of_nothing_fails():
    assert [*Run().breaches()] == ["0 creates, but 1 were due"]


async def test_kubectl_that_fails_is_quoted(tmp_path, monkeypatch):
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\ncat\necho forbidden >&2\nexit 1\n")
    kubectl.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    with pytest.raises(CheckFailed, match=r"^kubectl create -f -: forbidden$"):
        await Cluster("dev").kubectl("create", "-f", "-", sent="{}")


@pytest.fixture
async def cluster(service_settings, worker_settings, issuer, database, mail_server, tmp_path):
    worker = worker_process(worker_settings, tmp_path, EMAIL_CLAIM_SECONDS="5")
    processes = {"api": api_process(service_settings, tmp_path), "notifications": worker}
    variables = {"ACCESS_TOKEN": issuer.token(), "AMQP_URL": worker_settings.amqp_url}
    async with started(*processes.values()):
        yield LocalCluster(processes, database, mail_server, variables, tmp_path / "callers.log")


async def check(cluster: LocalCluster) -> Run:
    faults: list[Fault] = [("rolling restart", cluster.restart)]
    faults += [(f"{name} killed", partial(cluster.kill, name)) for name in cluster.processes]
    return await run(cluster, faults, rate=8, between_seconds=0.5, drain_seconds=20.0)


@pytest.mark.long
async def test_check_passes_where_nothing_is_lost(cluster, database):
    record = await check(cluster)

    assert [*record.breaches()] == []
    assert record.kills == 1
    assert any(create.failures for create in record.creates)
    rows = await database.fetch("SELECT idempotency_key, id FROM calculation_request")
    stored = {row["idempotency_key"]: uuid_of(row["id"]) for row in rows}
    assert {create.key: create.uuid for create in record.creates} == stored


@pytest.mark.long
@pytest.mark.parametrize(
    ("broken", "breach"),
    [
        ("create -f -", "kubectl create -f: forbidden"),
        ("crash", "kubectl wait: timed out"),
        ("no kill", "notifications was not killed: its exit status is 0"),
        ("rollout restart", "kubectl rollout restart: forbidden"),
    ],
)
async def test_check_fails_and_keeps_its_figures(cluster, broken, breach):
    cluster.broken = broken
    record = await check(cluster)

    assert any(failure.startswith(breach) for failure in record.failed)
    assert record.creates or broken == "create -f -"
    assert all(create.uuid == record.stored[create.key].uuid for create in record.creates)


@pytest.mark.long
async def test_check_fails_without_a_first_create(cluster):
    cluster.variables["ACCESS_TOKEN"] = "of another issuer"
    cluster.seconds_to_first_create = 5.0
    record = await check(cluster)

    assert [*record.breaches()] == ["no create within 5 s", "0 creates, but 1 were due"]
