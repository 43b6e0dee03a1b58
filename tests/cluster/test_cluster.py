"""`make cluster-check` with processes on this machine in place of pods, and what makes it fail."""

import asyncio
import json
import signal
import stat
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from service.identifiers import uuid_of
from service.postgres.pool import Connection
from tests.cluster.__main__ import CALLERS, CheckFailed, Cluster, Create, Faults, Run, run
from tests.harness.mail_server import MailServer
from tests.harness.processes import Process, api_process, started, worker_process

_STORED = {f"run-0-{number}": (f"req_{number}", f"calculation-of-req_{number}") for number in (1, 2)}
_RUN = Run(
    due=2.0,
    creates=[Create("run-0-1", "req_1"), Create("run-0-2", "req_2", ["503"])],
    stored=_STORED,
    recipients=["run-0-1@example.com", "run-0-2@example.com"],
    queued={"notifications": 0},
)
# As much of the API's Deployment as the check reads.
_CONTAINER = {"image": "calculation-requests:dev", "securityContext": {}}
_API = {"spec": {"template": {"spec": {"securityContext": {}, "containers": [_CONTAINER]}}}}


@pytest.mark.parametrize(
    ("changes", "breach"),
    [
        ({"due": 2.6}, "2 creates, but 3 were due"),
        ({"creates": [Create("run-0-1", None, ["401"])] * 2}, "run-0-1 never got 200: ['401']"),
        ({"creates": [Create("run-0-1", "req_9")] * 2}, "run-0-1 got req_9, but req_1 is stored"),
        ({"stored": _STORED | {"run-0-1": ("req_1", None)}}, "run-0-1 has the calculation None"),
        ({"recipients": ["run-0-2@example.com"]}, "run-0-1@example.com: 0 e-mails"),
        ({"recipients": [*_RUN.recipients, "run-9-9@example.com"]}, "run-9-9@example.com: 1 e-mails"),
        ({"recipients": [*_RUN.recipients] * 2}, "2 e-mails were repeated, after 0 kills"),
        ({"queued": {"notifications.dead": 1}}, "notifications.dead has 1 messages"),
        ({"failed": ["kubectl get: timed out"]}, "kubectl get: timed out"),
    ],
)
def test_each_breach_is_found(changes, breach):
    assert {*msgspec.structs.replace(_RUN, **changes).breaches()} == {breach}


def test_run_that_lost_nothing_has_no_breach_and_run_of_nothing_fails():
    assert [*_RUN.breaches()] == []
    assert _RUN.summary() == "2 creates, 0 e-mails repeated; tries that failed: 1 503"
    assert [*Run().breaches()] == ["0 creates, but 1 were due"]


async def test_kubectl_that_fails_is_quoted(tmp_path, monkeypatch):
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\ncat\necho forbidden >&2\nexit 1\n")
    kubectl.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    with pytest.raises(CheckFailed, match=r"^kubectl create -f -: forbidden$"):
        await Cluster("dev").kubectl("create", "-f", "-", sent="{}")


@dataclass
class LocalCluster(Cluster):
    """Does what each command does in a cluster, unless *broken* says what goes wrong."""

    processes: Mapping[str, Process]
    database: Connection
    mail_server: MailServer
    variables: dict[str, str]  # of the callers
    log: Path  # likewise
    calling: asyncio.subprocess.Process | None = None
    broken: Collection[str] = ()
    restarts: int = 0
    exit_status: int = 0

    async def kubectl(self, *words: str, sent: str = "") -> str:
        if " ".join(words[:2]) in self.broken:
            raise CheckFailed(f"kubectl {' '.join(words[:2])}: forbidden")
        match words:
            case ("exec", pod, "--", "python", "-c", _):
                await self._signal(pod)
            case ("create", *_):
                await self._call(json.loads(sent)["spec"]["containers"][0]["command"])
            case ("rollout", "restart", *_):
                for process in self.processes.values():
                    await process.stop()
                    process.start()
            case ("rollout", "status", *_):
                await asyncio.gather(*(each.becomes_ready() for each in self.processes.values()))
            case ("wait", _, "--for=jsonpath={.status.phase}=Succeeded", _):
                if self.calling is None or await self.calling.wait() != 0:
                    raise CheckFailed("kubectl wait: timed out")
            case ("delete", *_) if self.calling is not None and self.calling.returncode is None:
                self.calling.kill()
        return str(await self._read(*words))

    async def _read(self, *words: str) -> Any:
        """Return what a command prints."""
        sent = [each for mail in self.mail_server.accepted for each in mail.recipients]
        messages = [{"To": [{"Address": each}]} for each in sent]
        printed: Any = None
        match words:
            case ("exec", "statefulset/postgres", *_, statement):
                printed = await self.database.fetchval(statement)
            case ("logs", *_):
                printed = self.log.read_text()
            case ("get", "pod", "--selector", selector, *_):
                printed = selector.rpartition("=")[2]
            case ("get", "pod", _, "-o", path):
                printed = self.exit_status if "exitCode" in path else self.restarts
            case ("get", "deploy", *_):
                printed = json.dumps(_API)
            case ("get", "--raw", _):
                printed = json.dumps({"total": len(messages), "messages": messages})
        return "" if printed is None else printed

    async def _call(self, command: list[str]) -> None:
        here = {"python": sys.executable, "http://api": self.processes["api"].base_url}
        words = [here.get(word, word) for word in command]
        with self.log.open("wb") as log:
            self.calling = await asyncio.create_subprocess_exec(
                *words, env=self.variables, cwd=CHECKOUT, stdout=log, stderr=log
            )

    async def _signal(self, pod: str) -> None:
        """Send a signal to the process in a pod. A process that was killed is started again."""
        if pod == CALLERS:
            assert self.calling is not None
            self.calling.send_signal(signal.SIGKILL if "crash" in self.broken else signal.SIGTERM)
            return
        process = self.processes[pod]
        process.running.send_signal(signal.SIGTERM if "no kill" in self.broken else signal.SIGKILL)
        status = await process.exit_status()
        self.exit_status, self.restarts = (status if status >= 0 else 128 - status), self.restarts + 1
        process.start()
        await process.becomes_ready()


@pytest.fixture
async def cluster(service_settings, worker_settings, issuer, database, mail_server, tmp_path):
    worker = worker_process(worker_settings, tmp_path, EMAIL_CLAIM_SECONDS="5")
    processes = {"api": api_process(service_settings, tmp_path), "notifications": worker}
    variables = {"ACCESS_TOKEN": issuer.token(), "AMQP_URL": worker_settings.amqp_url}
    async with started(*processes.values()):
        yield LocalCluster("local", processes, database, mail_server, variables, tmp_path / "callers.log")


async def check(cluster: LocalCluster) -> Run:
    faults: Faults = {f"{name} killed": partial(cluster.kill, name) for name in cluster.processes}
    faults["rolling restart"] = cluster.restart
    return await run(cluster, faults, rate=8, between_seconds=0.5, drain_seconds=20.0)


@pytest.mark.long
async def test_check_passes_where_nothing_is_lost(cluster, database):
    record = await check(cluster)

    assert [*record.breaches()] == []
    assert record.kills == 1
    assert any(create.failures for create in record.creates)
    rows = await database.fetch("SELECT idempotency_key, id FROM calculation_request")
    assert {each.key: each.uuid for each in record.creates} == {key: uuid_of(id_) for key, id_ in rows}


@pytest.mark.long
async def test_check_fails_and_keeps_its_figures(cluster):
    cluster.broken = ("no kill", "rollout restart", "crash")
    record = await check(cluster)

    assert record.failed == [
        "api was not killed: its exit status is 0",
        "notifications was not killed: its exit status is 0",
        "kubectl rollout restart: forbidden",
        "kubectl wait: timed out",
    ]
    assert record.creates
    assert all(create.uuid == record.stored[create.key][0] for create in record.creates)


@pytest.mark.long
async def test_check_fails_without_a_first_create(cluster):
    cluster.variables["ACCESS_TOKEN"] = "of another issuer"
    cluster.seconds_to_first_create = 5.0
    record = await check(cluster)

    assert [*record.breaches()] == ["no create within 5 s", "0 creates, but 1 were due"]
