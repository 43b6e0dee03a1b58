"""The development overlay in a cluster, by kubectl."""

import asyncio
import json
import re
import shutil
from base64 import b64decode
from contextlib import suppress
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
_RESTARTS = "{.status.containerStatuses[0].restartCount}"
_EXIT_STATUS = "{.status.containerStatuses[0].lastState.terminated.exitCode}"
_SECRET = "{.spec.template.spec.containers[0].env[*].valueFrom.secretKeyRef.name}"
_KILLED = "137"  # by SIGKILL
_MOST_EMAILS = 1_000_000
_PASSWORD = "made-up-second-password"
_USER = re.compile("//[^/@]+@")  # of a URL, with the password
_STORED = """
    SELECT json_object_agg(idempotency_key, json_build_array(id, calculation_id))
      FROM calculation_request
     WHERE idempotency_key LIKE '{}-%'
"""


class CheckFailed(Exception):
    """A step of the check has failed. The message says which, and why."""


class Create(msgspec.Struct, frozen=True):
    """A create, as callers.py prints it. Without a uuid, no try got 200."""

    key: str
    uuid: str | None
    failures: list[str] = []


class Cluster:
    """The namespace of the development overlay, in the cluster of KUBECONFIG. Each step may raise CheckFailed."""

    seconds_to_first_create = 60.0

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    async def kubectl(self, *words: str, sent: str = "") -> str:
        """Run kubectl to its end, and return its output."""
        program = shutil.which("kubectl")
        if program is None:
            raise CheckFailed("kubectl is not installed")
        pipe = asyncio.subprocess.PIPE
        command = (program, "--namespace", self._namespace, *words)
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        output, errors = await process.communicate(sent.encode())
        if process.returncode:
            raise CheckFailed(f"kubectl {' '.join(words[:4])}: {errors.decode().strip()}")
        return output.decode().strip()

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
        """Return the creates so far."""
        lines = (await self.kubectl("logs", CALLERS)).splitlines()
        return [msgspec.json.decode(line, type=Create) for line in lines if line.startswith("{")]

    async def stop_callers(self) -> None:
        """Stop the callers after the creates in flight. Fails unless they end with status 0."""
        await self.kubectl("exec", CALLERS, "--", "python", "-c", "import os; os.kill(1, 15)")
        await self._wait_for("jsonpath={.status.phase}=Succeeded", CALLERS)

    async def delete_callers(self) -> None:
        await self.kubectl("delete", "pod", CALLERS, "--ignore-not-found", "--grace-period=1")

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
        restarts = int(await self.kubectl("get", "pod", pod, "-o", f"jsonpath={_RESTARTS}"))
        with suppress(CheckFailed):  # The command may die with the process. The exit status counts.
            # SIGKILL to all of the pod's processes, but PID 1 and itself
            await self.kubectl("exec", pod, "--", "python", "-c", "import os; os.kill(-1, 9)")
        for state in (f"jsonpath={_RESTARTS}={restarts + 1}", "condition=Ready"):
            await self._wait_for(state, pod)
        status = await self.kubectl("get", "pod", pod, "-o", f"jsonpath={_EXIT_STATUS}")
        if status != _KILLED:
            raise CheckFailed(f"{process} was not killed: its exit status is {status}")

    async def rotate_passwords(self) -> None:
        """Give the processes second users of Postgres and RabbitMQ, and end the login of RabbitMQ's first."""
        await self._psql(f"CREATE ROLE rotated LOGIN SUPERUSER PASSWORD '{_PASSWORD}'")
        await self._add_user("rotated")
        name = (await self.kubectl("get", "deploy", "api", "-o", f"jsonpath={_SECRET}")).split()[0]
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
        rows = json.loads(await self._psql(_STORED.format(prefix)) or "{}")
        return {key: (uuid_of(UUID(row[0])), row[1]) for key, row in rows.items()}

    async def queued(self) -> dict[str, int]:
        """Return the number of messages in each queue, and of events that RabbitMQ has not confirmed."""
        listed = await self._rabbitmqctl("list_queues", "--no-table-headers", "name", "messages")
        undelivered = await self._psql("SELECT count(*) FROM outbox")
        pairs = [*map(str.split, listed.splitlines()), ["the outbox", undelivered]]
        return {name: int(messages) for name, messages in pairs}

    async def recipients(self, prefix: str) -> list[str]:
        """Return the recipients of a run's e-mails, once for each e-mail."""
        proxy = f"/api/v1/namespaces/{self._namespace}/services/mailpit:web/proxy/api/v1/messages"
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
        "image": like["containers"][0]["image"],
        "command": ["python", "-c", script, *arguments],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "securityContext": like["containers"][0]["securityContext"],
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": like["securityContext"],
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": CALLERS}, "spec": spec}
