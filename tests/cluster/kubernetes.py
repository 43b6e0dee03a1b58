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
from tests.cluster.verdict import Create, Stored
from tests.harness.waiting import until

PROCESSES = ("api", "relay", "notifications", "calculations")
CALLERS = "cluster-check-callers"
KILL = "import os; os.kill(-1, 9)"  # every process of the pod, but PID 1 and itself
TERMINATE = "import os; os.kill(1, 15)"
KILLED = 128 + 9
_POLL_SECONDS = 1.0
_PAGE, _MOST_EMAILS = 500, 1_000_000
_PASSWORD = "made-up-second-password"
_USER = re.compile("//[^/@]+@")  # of a URL, with the password
_RABBITMQCTL = ("exec", "statefulset/rabbitmq", "--", "rabbitmqctl", "--quiet")
_STORED = """
    SELECT json_object_agg(idempotency_key, json_build_array(id, calculation_id))
      FROM calculation_request
     WHERE idempotency_key LIKE '{}-%'
"""


class CheckFailed(Exception):
    """A step of the check has failed. The message says which, and why."""


class Cluster:
    """A namespace with the development overlay, in the cluster of KUBECONFIG."""

    seconds_to_first_create = 300.0
    seconds_to_change = 300.0  # of a process that is killed, or told to end

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    async def kubectl(self, *words: str, sent: str = "") -> str:
        """Run kubectl to its end, and return its output. Raises CheckFailed."""
        program = shutil.which("kubectl")
        if program is None:
            raise CheckFailed("kubectl is not installed")
        pipe = asyncio.subprocess.PIPE
        command = (program, "--namespace", self._namespace, *words)
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        output, errors = await process.communicate(sent.encode())
        if process.returncode:
            raise CheckFailed(f"kubectl {' '.join(words[:4])}: {errors.decode().strip()}")
        return output.decode()

    async def start_callers(self, prefix: str, rate: float) -> None:
        """Start callers.py in a pod, because a port-forward ends with the pod that it leads to.

        Returns after the first create. Raises CheckFailed, also if there is none in time.
        """
        # PID 1 of a container gets no SIGKILL from within it. Here PID 1 is the pod's pause process.
        shared = json.dumps({"spec": {"template": {"spec": {"shareProcessNamespace": True}}}})
        for deployment in _deployments():
            await self.kubectl("patch", deployment, "--patch", shared)
        await self.wait_for_rollout()
        sign = "exec deploy/api -- python -m service token demo --key /issuer/key.pem"
        token = (await self.kubectl(*sign.split())).strip()
        await self._add_user("callers")
        environment = {"ACCESS_TOKEN": token, "AMQP_URL": f"amqp://callers:{_PASSWORD}@rabbitmq:5672/"}
        api = json.loads(await self.kubectl("get", "deploy", "api", "-o", "json"))
        pod = callers_pod(api, environment, "http://api", str(rate), prefix)
        await self.kubectl("create", "-f", "-", sent=json.dumps(pod))

        async def has_created() -> bool:
            if (await self._callers())["phase"] == "Pending":
                return False
            return any(create.uuid is not None for create in await self.creates())

        if not await until(has_created, seconds=self.seconds_to_first_create, pause_seconds=_POLL_SECONDS):
            raise CheckFailed(f"no create within {self.seconds_to_first_create:.0f} s")

    async def creates(self) -> list[Create]:
        """Return the creates so far."""
        lines = (await self.kubectl("logs", CALLERS)).splitlines()
        return [msgspec.json.decode(line, type=Create) for line in lines if line.startswith("{")]

    async def stop_callers(self) -> None:
        """Stop the callers after the creates in flight. Raises CheckFailed unless they end with status 0."""
        with suppress(CheckFailed):  # They may have ended. Their exit status counts.
            await self.kubectl("exec", CALLERS, "--", "python", "-c", TERMINATE)
        ended: dict[str, Any] = {}

        async def have_ended() -> bool:
            for status in (await self._callers()).get("containerStatuses", ()):
                ended.update(status["state"].get("terminated", {}))
            return bool(ended)

        await until(have_ended, seconds=self.seconds_to_change, pause_seconds=_POLL_SECONDS)
        if ended.get("exitCode") != 0:
            last = (await self.kubectl("logs", CALLERS, "--tail=1")).strip()
            raise CheckFailed(f"the callers ended with status {ended.get('exitCode')}: {last}")

    async def delete_callers(self) -> None:
        await self.kubectl("delete", "pod", CALLERS, "--ignore-not-found", "--grace-period=1")

    async def _callers(self) -> dict[str, Any]:
        """Return the status of their pod."""
        status: dict[str, Any] = json.loads(await self.kubectl("get", "pod", CALLERS, "-o", "json"))["status"]
        return status

    async def restart(self) -> None:
        """Replace the pods of all processes."""
        await self.kubectl("rollout", "restart", *_deployments())
        await self.wait_for_rollout()

    async def upgrade(self, image: str) -> None:
        """Replace the image of all processes, also of their init containers."""
        await self.kubectl("set", "image", *_deployments(), f"*={image}")
        await self.wait_for_rollout()

    async def kill(self, process: str) -> None:
        """Send SIGKILL to a process, and wait until it runs again. Raises CheckFailed unless it died of it.

        `kubectl delete --force` is no kill: the kubelet sends SIGTERM, and SIGKILL two seconds later.
        """
        before = await self._containers(process)
        if not before:
            raise CheckFailed(f"{process} has no pod")
        for pod in before:
            with suppress(CheckFailed):  # The command may die with the process. The exit status counts.
                await self.kubectl("exec", pod, "--", "python", "-c", KILL)
        now = before

        async def run_again() -> bool:
            nonlocal now
            now = await self._containers(process)
            return all(
                pod in now and now[pod]["ready"] and now[pod]["restartCount"] > before[pod]["restartCount"]
                for pod in before
            )

        run_again_in_time = await until(
            run_again, seconds=self.seconds_to_change, pause_seconds=_POLL_SECONDS
        )
        ends = [status["lastState"].get("terminated", {}).get("exitCode") for status in now.values()]
        if not run_again_in_time or {*ends} != {KILLED}:
            raise CheckFailed(f"{process} was not killed, or does not run again: exit status {ends}")

    async def _containers(self, process: str) -> dict[str, dict[str, Any]]:
        """Return the status of a process's container by its pod, without pods that are being deleted."""
        selector = f"app.kubernetes.io/component={process}"
        found = json.loads(await self.kubectl("get", "pod", "--selector", selector, "-o", "json"))
        return {
            pod["metadata"]["name"]: pod["status"]["containerStatuses"][0]
            for pod in found["items"]
            if "deletionTimestamp" not in pod["metadata"]
        }

    async def _add_user(self, name: str) -> None:
        await self.kubectl(*_RABBITMQCTL, "add_user", name, _PASSWORD)
        await self.kubectl(*_RABBITMQCTL, "set_permissions", name, ".*", ".*", ".*")

    async def rotate_passwords(self) -> None:
        """Give the processes second users of Postgres and RabbitMQ, and end the login of RabbitMQ's first."""
        await self.psql(f"CREATE ROLE rotated LOGIN SUPERUSER PASSWORD '{_PASSWORD}'")
        await self._add_user("rotated")
        environment = "jsonpath={.spec.template.spec.containers[0].env[*].valueFrom.secretKeyRef.name}"
        name = (await self.kubectl("get", "deploy", "api", "-o", environment)).split()[0]
        secret = json.loads(await self.kubectl("get", "secret", name, "-o", "json"))
        urls = {key: b64decode(value).decode() for key, value in secret["data"].items()}
        rotated = {
            key: _USER.sub(f"//rotated:{_PASSWORD}@", url) for key, url in urls.items() if _USER.search(url)
        }
        await self.kubectl("patch", "secret", name, "--patch", json.dumps({"stringData": rotated}))
        await self.restart()
        await self.kubectl(*_RABBITMQCTL, "delete_user", "made-up-user")

    async def wait_for_rollout(self) -> None:
        """Wait until all processes have their new pods. Raises CheckFailed."""
        for deployment in _deployments():
            await self.kubectl("rollout", "status", deployment, "--timeout=5m")

    async def psql(self, statement: str) -> str:
        """Run a statement as Postgres' superuser, and return its only value."""
        words = ("psql", "--username=postgres", "--tuples-only", "--no-align", "--command")
        return (await self.kubectl("exec", "statefulset/postgres", "--", *words, statement)).strip()

    async def stored(self, prefix: str) -> dict[str, Stored]:
        """Return a run's requests by Idempotency-Key."""
        rows = json.loads(await self.psql(_STORED.format(prefix)) or "{}")
        return {key: Stored(uuid_of(UUID(row[0])), row[1]) for key, row in rows.items()}

    async def undelivered(self) -> int:
        """Return how many events RabbitMQ has not confirmed."""
        return int(await self.psql("SELECT count(*) FROM outbox"))

    async def queued(self) -> dict[str, int]:
        """Return the number of messages in each queue."""
        listed = await self.kubectl(*_RABBITMQCTL, "list_queues", "--no-table-headers", "name", "messages")
        return {name: int(messages) for name, messages in map(str.split, listed.splitlines())}

    async def recipients(self, prefix: str) -> list[str]:
        """Return the recipients of a run's e-mails, once for each e-mail."""
        proxy = f"/api/v1/namespaces/{self._namespace}/services/mailpit:web/proxy/api/v1/messages"
        found: list[str] = []
        for start in range(0, _MOST_EMAILS, _PAGE):
            page = json.loads(await self.kubectl("get", "--raw", f"{proxy}?start={start}&limit={_PAGE}"))
            found += [message["To"][0]["Address"] for message in page["messages"]]
            if len(page["messages"]) < _PAGE:
                break
        return [address for address in found if address.startswith(f"{prefix}-")]


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


def _deployments() -> list[str]:
    return [f"deploy/{process}" for process in PROCESSES]
