"""`python -m tests.cluster`: faults in a cluster under load. Exit status 1 if the check failed."""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec

from service.identifiers import uuid_of
from tests.harness.waiting import until
from worker.process import ROLES

PROCESSES = ("api", *ROLES)
CALLERS = "cluster-check-callers"
_DEPLOYMENTS = [f"deploy/{process}" for process in PROCESSES]
_RESTARTS = "jsonpath={.status.containerStatuses[0].restartCount}"
_EXIT_STATUS = "jsonpath={.status.containerStatuses[0].lastState.terminated.exitCode}"
_SECRET = "jsonpath={.spec.template.spec.containers[0].env[*].valueFrom.secretKeyRef.name}"
_MOST_EMAILS = 1_000_000
_PASSWORD = "made-up-second-password"
_USER = re.compile("//[^/@]+@")  # of a URL, with the password

Faults = dict[str, Callable[[], Awaitable[None]]]


class CheckFailed(Exception):
    """A step of the check has failed. The message says which, and why."""


class Create(msgspec.Struct, frozen=True):
    """A create, as callers.py prints it. Without a uuid, no try got 200."""

    key: str
    uuid: str | None
    failures: list[str] = []


class Run(msgspec.Struct, kw_only=True):
    """The record of a run: every create is stored once, and gets its calculation and one e-mail."""

    due: float = 1.0  # creates, by the rate and the time from the first to the end
    creates: Sequence[Create] = ()
    stored: Mapping[str, Sequence[str | None]] = {}  # uuid and calculation_id by Idempotency-Key
    recipients: Sequence[str] = ()  # of every e-mail
    queued: Mapping[str, int] = {}  # the messages in each queue at the end, and the events in the outbox
    kills: int = 0  # how often a process was killed, which may repeat the e-mails that it had in flight
    failed: list[str] = []  # steps of the check, with the reason

    def breaches(self) -> Iterator[str]:
        """Yield what must not happen."""
        yield from self.failed
        if len(self.creates) < 0.8 * self.due:
            yield f"{len(self.creates)} creates, but {self.due:.0f} were due"
        for create in self.creates:
            uuid, calculation_id = self.stored.get(create.key, (None, None))
            if create.uuid is None:
                yield f"{create.key} never got 200: {create.failures}"
            elif create.uuid != uuid:
                yield f"{create.key} got {create.uuid}, but {uuid} is stored"
            elif calculation_id != f"calculation-of-{uuid}":
                yield f"{create.key} has the calculation {calculation_id}"
        emails = Counter(self.recipients)
        for recipient in sorted({f"{key}@example.com" for key in self.stored} ^ emails.keys()):
            yield f"{recipient}: {emails[recipient]} e-mails"
        if self.repeats > self.kills * 16:  # the default EMAIL_CONCURRENCY of two processes
            yield f"{self.repeats} e-mails were repeated, after {self.kills} kills"
        yield from (f"{queue} has {messages} messages" for queue, messages in self.queued.items() if messages)

    @property
    def repeats(self) -> int:
        return len(self.recipients) - len({*self.recipients})

    def summary(self) -> str:
        failures = Counter(failure for create in self.creates for failure in create.failures)
        tries = ", ".join(f"{count} {name}" for name, count in failures.items()) or "none"
        return f"{len(self.creates)} creates, {self.repeats} e-mails repeated; tries that failed: {tries}"


@dataclass
class Cluster:
    """The development overlay's namespace, in the cluster of KUBECONFIG. Each step may raise CheckFailed."""

    namespace: str
    seconds_to_first_create = 60.0

    async def kubectl(self, *words: str, sent: str = "") -> str:
        """Run kubectl to its end, and return its output."""
        command = ["kubectl", "--namespace", self.namespace, *words]
        call = partial(subprocess.run, command, input=sent, capture_output=True, text=True, check=False)
        ended = await asyncio.to_thread(call)
        if ended.returncode:
            raise CheckFailed(f"kubectl {' '.join(words[:4])}: {ended.stderr.strip()}")
        return ended.stdout.strip()

    async def start_callers(self, prefix: str, rate: float) -> None:
        """Start callers.py in a pod, because a port-forward ends with the pod that it leads to.

        Returns after the first create, and fails if there is none in time.
        """
        # PID 1 of a container gets no SIGKILL from within it. Here PID 1 is the pod's pause process.
        shared = json.dumps({"spec": {"template": {"spec": {"shareProcessNamespace": True}}}})
        for deployment in _DEPLOYMENTS:
            await self.kubectl("patch", deployment, "--patch", shared)
        await self._roll_out()
        sign = "exec deploy/api -- python -m service token demo --key /issuer/key.pem"
        token = await self.kubectl(*sign.split())
        await self._add_user("callers")
        variables = {"ACCESS_TOKEN": token, "AMQP_URL": f"amqp://callers:{_PASSWORD}@rabbitmq:5672/"}
        api = json.loads(await self.kubectl("get", "deploy", "api", "-o", "json"))
        pod = callers_pod(api, variables, "http://api", str(rate), prefix)
        await self.kubectl("create", "-f", "-", sent=json.dumps(pod))
        await self._wait_for("condition=Ready", CALLERS)

        async def has_created() -> bool:
            return any(create.uuid is not None for create in await self.creates())

        if not await until(has_created, seconds=self.seconds_to_first_create, pause_seconds=1.0):
            raise CheckFailed(f"no create within {self.seconds_to_first_create:.0f} s")

    async def creates(self) -> list[Create]:
        lines = (await self.kubectl("logs", CALLERS)).splitlines()
        return [msgspec.json.decode(line, type=Create) for line in lines if line.startswith("{")]

    async def stop_callers(self) -> None:
        """Stop the callers after the creates in flight. Fails unless they end with status 0."""
        await self.kubectl("exec", CALLERS, "--", "python", "-c", "import os; os.kill(1, 15)")
        await self._wait_for("jsonpath={.status.phase}=Succeeded", CALLERS)

    async def restart(self) -> None:
        """Replace the pods of all processes."""
        await self._roll_out("rollout", "restart", *_DEPLOYMENTS)

    async def upgrade(self, image: str) -> None:
        """Replace the image of all processes, also of their init containers."""
        await self._roll_out("set", "image", *_DEPLOYMENTS, f"*={image}")

    async def kill(self, process: str) -> None:
        """Send SIGKILL to a process, and wait until it runs again. Fails unless it died of it.

        `kubectl delete --force` is no kill: the kubelet sends SIGTERM, and SIGKILL two seconds later.
        """
        of_process = ("--selector", f"app.kubernetes.io/component={process}")
        newest = ("--sort-by=.metadata.creationTimestamp", "-o", "jsonpath={.items[-1:].metadata.name}")
        pod = await self.kubectl("get", "pod", *of_process, *newest)
        restarts = int(await self.kubectl("get", "pod", pod, "-o", _RESTARTS))
        with suppress(CheckFailed):  # The command may die with the process. The exit status counts.
            # SIGKILL to all of the pod's processes, but PID 1 and itself
            await self.kubectl("exec", pod, "--", "python", "-c", "import os; os.kill(-1, 9)")
        for state in (f"{_RESTARTS}={restarts + 1}", "condition=Ready"):
            await self._wait_for(state, pod)
        status = await self.kubectl("get", "pod", pod, "-o", _EXIT_STATUS)
        if status != "137":  # by SIGKILL
            raise CheckFailed(f"{process} was not killed: its exit status is {status}")

    async def rotate_passwords(self) -> None:
        """Give the processes second users of Postgres and RabbitMQ, and end the login of RabbitMQ's first."""
        await self._psql(f"CREATE ROLE rotated LOGIN SUPERUSER PASSWORD '{_PASSWORD}'")
        await self._add_user("rotated")
        name = (await self.kubectl("get", "deploy", "api", "-o", _SECRET)).split()[0]
        secret = json.loads(await self.kubectl("get", "secret", name, "-o", "json"))
        urls = {key: b64decode(value).decode() for key, value in secret["data"].items()}
        rotated = {
            key: _USER.sub(f"//rotated:{_PASSWORD}@", url) for key, url in urls.items() if _USER.search(url)
        }
        await self.kubectl("patch", "secret", name, "--patch", json.dumps({"stringData": rotated}))
        await self.restart()
        await self._rabbitmqctl("delete_user", "made-up-user")

    async def stored(self, prefix: str) -> dict[str, tuple[str, str | None]]:
        """Return uuid and calculation_id of a run's requests by Idempotency-Key."""
        rows = await self._psql(
            "SELECT json_object_agg(idempotency_key, json_build_array(id, calculation_id)) "  # noqa: S608
            f"FROM calculation_request WHERE idempotency_key LIKE '{prefix}-%'"
        )
        return {key: (uuid_of(UUID(row[0])), row[1]) for key, row in json.loads(rows or "{}").items()}

    async def queued(self) -> dict[str, int]:
        """Return the number of messages in each queue, and of events that RabbitMQ has not confirmed."""
        listed = await self._rabbitmqctl("list_queues", "--no-table-headers", "name", "messages")
        undelivered = await self._psql("SELECT count(*) FROM outbox")
        pairs = [*map(str.split, listed.splitlines()), ["outbox", undelivered]]
        return {name: int(messages) for name, messages in pairs}

    async def recipients(self, prefix: str) -> list[str]:
        """Return the recipients of a run's e-mails, once for each e-mail."""
        proxy = f"/api/v1/namespaces/{self.namespace}/services/mailpit:web/proxy/api/v1/messages"
        found = json.loads(await self.kubectl("get", "--raw", f"{proxy}?limit={_MOST_EMAILS}"))
        if len(found["messages"]) < found["total"]:
            raise CheckFailed(f"Mailpit shows {len(found['messages'])} of {found['total']} e-mails")
        addresses = [message["To"][0]["Address"] for message in found["messages"]]
        return [address for address in addresses if address.startswith(f"{prefix}-")]

    async def _roll_out(self, *words: str) -> None:
        """Run a command, and wait until all processes have their new pods."""
        if words:
            await self.kubectl(*words)
        for deployment in _DEPLOYMENTS:
            await self.kubectl("rollout", "status", deployment, "--timeout=5m")

    async def _wait_for(self, state: str, pod: str) -> None:
        await self.kubectl("wait", f"pod/{pod}", f"--for={state}", "--timeout=3m")

    async def _add_user(self, name: str) -> None:
        await self._rabbitmqctl("add_user", name, _PASSWORD)
        await self._rabbitmqctl("set_permissions", name, ".*", ".*", ".*")

    async def _rabbitmqctl(self, *words: str) -> str:
        return await self.kubectl("exec", "statefulset/rabbitmq", "--", "rabbitmqctl", "--quiet", *words)

    async def _psql(self, statement: str) -> str:
        """Run a statement as Postgres' superuser, and return its only value."""
        words = ("psql", "--username=postgres", "--tuples-only", "--no-align", "--command")
        return await self.kubectl("exec", "statefulset/postgres", "--", *words, statement)


def callers_pod(api: dict[str, Any], environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """Return a pod that runs callers.py. It has the image of the API's, and no more privileges."""
    like = api["spec"]["template"]["spec"]
    script = Path(__file__).with_name("callers.py").read_text()
    container = {
        "name": CALLERS,
        "command": ["python", "-c", script, *arguments],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        **{part: like["containers"][0][part] for part in ("image", "securityContext")},
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": like["securityContext"],
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": CALLERS}, "spec": spec}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--namespace", default="calculation-requests-dev", help="with overlays/dev")
    parser.add_argument("--rate", type=float, default=20.0, help="creates a second")
    parser.add_argument("--upgrade-to", metavar="IMAGE", help="also upgrade to this image")
    arguments = parser.parse_args()
    cluster = Cluster(arguments.namespace)
    # In their order. Each ends once all processes are ready again.
    faults: Faults = {
        "rolling restart": cluster.restart,
        **{f"{process} killed": partial(cluster.kill, process) for process in PROCESSES},
        "rotation of passwords": cluster.rotate_passwords,
    }
    if arguments.upgrade_to is not None:
        faults["upgrade"] = partial(cluster.upgrade, arguments.upgrade_to)
    record = asyncio.run(run(cluster, faults, rate=arguments.rate))
    breaches = list(record.breaches())
    print(record.summary(), *breaches, "failed" if breaches else "nothing was lost", sep="\n")
    return 1 if breaches else 0


async def run(
    cluster: Cluster,
    faults: Faults,
    *,
    rate: float,
    between_seconds: float = 20.0,  # of undisturbed load
    drain_seconds: float = 180.0,  # for the last events and e-mails
) -> Run:
    """Inject the faults under load, and return what came of the creates. A step that fails ends no other."""
    record = Run()
    prefix = f"run{int(time.time())}"

    async def attempt(step: Awaitable[object]) -> bool:
        try:
            await step
        except CheckFailed as error:
            record.failed.append(str(error))
            return False
        return True

    try:
        if await attempt(cluster.start_callers(prefix, rate)):
            began = time.monotonic()
            for name, fault in faults.items():
                await asyncio.sleep(between_seconds)
                print(name, flush=True)
                if await attempt(fault()):
                    record.kills += name == "notifications killed"
            await asyncio.sleep(between_seconds)
            record.due = rate * (time.monotonic() - began)
            await attempt(cluster.stop_callers())
            await attempt(_take_stock(cluster, record, prefix, drain_seconds))
    finally:
        await attempt(cluster.kubectl("delete", "pod", CALLERS, "--ignore-not-found", "--grace-period=1"))
    return record


async def _take_stock(cluster: Cluster, record: Run, prefix: str, seconds: float) -> None:
    """Wait until all work is done, for at most *seconds*, and record what is there."""
    record.creates = await cluster.creates()

    async def is_done() -> bool:
        record.stored = await cluster.stored(prefix)
        record.recipients = await cluster.recipients(prefix)
        record.queued = await cluster.queued()
        return not [*record.breaches()][len(record.failed) :]

    await until(is_done, seconds=seconds, pause_seconds=2.0)


if __name__ == "__main__":
    sys.exit(main())
